// The exact codecs, equal to codecs/exact/specification.py to the bit. Compiled once for each processor level.
//
// A block of 512 elements is worked on in the first cache level, as 8 groups of 64. Codes, widths and quotients are kept
// as arrays of bytes, so that one instruction takes the same bit of 64 elements. `pext` keeps the bits of the elements
// that send one, and `pdep` puts them back. Loops without intrinsics are for the compiler to vectorize. As in
// kernels.cpp, nothing of the standard library is instantiated.

#include "exact.hpp"
#include "exact_bits.hpp"

#include <cstring>
#if defined __AVX2__
#include <immintrin.h>
#endif

namespace towpath::exact {
namespace {

constexpr int64_t BLOCK = 512, GROUPS = BLOCK / 64, ENTRY = 4;
constexpr uint8_t ESCAPE = 10;  // the quotient's code that stands for all larger ones: all bits of the element follow
constexpr int QUIET = 2;        // from so many binary orders above the step on, eight elements share a bit
constexpr int SYMBOLS = 3;      // the most common exponents of values, which have codes of two bits

template <class Unsigned, class Signed_, int MANTISSA_>
struct Format {
    using Word = Unsigned;
    using Signed = Signed_;
    static constexpr int BYTES = sizeof(Word), BITS = 8 * BYTES, MANTISSA = MANTISSA_;
    static constexpr int TOP = (1 << (BITS - 1 - MANTISSA)) - 1;  // the largest exponent
    static constexpr Word MAGNITUDE = static_cast<Word>(~Word{0}) >> 1;
    // The most that a block can take if all planes are full, and what a read may touch after it.
    static constexpr int64_t MOST = (4 + ESCAPE + BITS) * BLOCK / 8 + 16;
};
using BFloat16 = Format<uint16_t, int16_t, 7>;
using Float16 = Format<uint16_t, int16_t, 10>;
using Float32 = Format<uint32_t, int32_t, 23>;

// ---- A block ----

template <class F>
struct Block {
    using Word = typename F::Word;
    alignas(64) Word now[BLOCK], old[BLOCK], code[BLOCK], quotient[BLOCK];
    alignas(64) uint8_t bytes[F::BYTES][BLOCK];  // of the codes
    alignas(64) uint8_t exponent[BLOCK], need[BLOCK], head[BLOCK], width[BLOCK];
    uint64_t valid[GROUPS];  // which elements there are
    int64_t count;

    void set_count(int64_t elements) {
        count = elements;
        for (int64_t g = 0; g < GROUPS; g++) {
            int64_t left = count - 64 * g;
            valid[g] = left >= 64 ? ~uint64_t{0} : left > 0 ? (uint64_t{1} << left) - 1 : 0;
        }
    }

    int64_t raw() const { return count * F::BYTES; }

    void take(const uint8_t *from, Word *to) {
        memcpy(to, from, raw());
        memset(to + count, 0, sizeof code - raw());
    }

    int count_above(const uint8_t *which, int limit) const {
        int found = 0;
        for (int64_t g = 0; g < GROUPS; g++) found += ones(above(which + 64 * g, limit) & valid[g]);
        return found;
    }
};

template <class F>
void take_exponents(const typename F::Word *__restrict x, uint8_t *__restrict exponent) {
    for (int64_t i = 0; i < BLOCK; i++) exponent[i] = static_cast<uint8_t>((x[i] >> F::MANTISSA) & F::TOP);
}

// For each head above `from` one more bit, until all elements of `mask` are done.
Writer write_unary(Writer out, const uint8_t *head, int from, uint64_t *mask) {
    for (int limit = from; limit < ESCAPE; limit++) {
        uint64_t any = 0;
        for (int64_t g = 0; g < GROUPS; g++) {
            uint64_t bits = above(head + 64 * g, limit) & mask[g];
            out.put(extract(bits, mask[g]), ones(mask[g]));
            any |= mask[g] = bits;
        }
        if (!any) break;
    }
    return out;
}

Reader read_unary(Reader in, uint8_t *head, int from, uint64_t *mask) {
    for (int limit = from; limit < ESCAPE; limit++) {
        uint64_t any = 0;
        for (int64_t g = 0; g < GROUPS; g++) {
            uint64_t bits = deposit(in.take(ones(mask[g])), mask[g]);
            add(bits, 1, head + 64 * g);
            any |= mask[g] = bits;
        }
        if (!any) break;
    }
    return in;
}

// Quotients that have no code of their own, with `bits` bits.
template <class F>
Writer write_escaped(Writer out, const Block<F> &block, int bits) {
    for (int64_t g = 0; g < GROUPS; g++)
        for (uint64_t left = above(block.head + 64 * g, ESCAPE - 1) & block.valid[g]; left; left &= left - 1)
            out.put(block.quotient[64 * g + __builtin_ctzll(left)], bits);
    return out;
}

template <class F>
Reader read_escaped(Reader in, Block<F> &block, int bits) {
    for (int64_t g = 0; g < GROUPS; g++)
        for (uint64_t left = above(block.head + 64 * g, ESCAPE - 1) & block.valid[g]; left; left &= left - 1) {
            uint64_t quotient = in.take(bits) & ((uint64_t{1} << bits) - 1);
            block.quotient[64 * g + __builtin_ctzll(left)] = static_cast<typename F::Word>(quotient);
        }
    return in;
}

// The bits of the codes below their widths, from bit `from` on.
template <class F>
Writer write_low(Writer out, const Block<F> &block, int from) {
    for (int bit = from; bit < F::BITS; bit++) {
        uint64_t any = 0;
        for (int64_t g = 0; g < GROUPS; g++) {
            uint64_t mask = above(block.width + 64 * g, bit) & block.valid[g];
            out.put(extract(bit_of(block.bytes[bit / 8] + 64 * g, bit % 8), mask), ones(mask));
            any |= mask;
        }
        if (!any) break;
    }
    return out;
}

template <class F>
Reader read_low(Reader in, Block<F> &block, int from) {
    for (int bit = from; bit < F::BITS; bit++) {
        uint64_t any = 0;
        for (int64_t g = 0; g < GROUPS; g++) {
            uint64_t mask = above(block.width + 64 * g, bit) & block.valid[g];
            add(deposit(in.take(ones(mask)), mask), 1 << bit % 8, block.bytes[bit / 8] + 64 * g);
            any |= mask;
        }
        if (!any) break;
    }
    return in;
}

template <class F>
void split(Block<F> &block) {
    for (int k = 0; k < F::BYTES; k++)
        for (int64_t i = 0; i < BLOCK; i++) block.bytes[k][i] = static_cast<uint8_t>(block.code[i] >> (8 * k));
}

// The codes from their quotients and their low bits.
template <class F>
void join(Block<F> &block) {
    for (int64_t i = 0; i < BLOCK; i++) {
        auto code = shifted_left(block.quotient[i], block.width[i]);
        for (int k = 0; k < F::BYTES; k++) code |= static_cast<typename F::Word>(block.bytes[k][i]) << (8 * k);
        block.code[i] = code;
    }
}

// ---- Differences: the code is the zigzag of the distance in representable numbers ----

template <class F>
struct Difference {
    using Word = typename F::Word;
    using Signed = typename F::Signed;
    static constexpr int QUOTIENT_BITS = F::BITS;
    static constexpr uint8_t WIDEST = F::BITS - 1;

    // Rises with the value, and is its own inverse.
    static Word ordered(Word x) { return x ^ (static_cast<Signed>(x) >> (F::BITS - 1) & F::MAGNITUDE); }

    // Set the codes. Return whether one of them is not zero.
    static bool prepare(Block<F> &block) {
        Word any = 0;
        for (int64_t i = 0; i < BLOCK; i++) {
            Word step = ordered(block.now[i]) - ordered(block.old[i]);
            Word code = static_cast<Word>(step << 1) ^ (static_cast<Signed>(step) >> (F::BITS - 1));
            block.code[i] = code;
            any |= code;
        }
        return any;
    }

    // The least step from which on a larger one costs more bits than it saves (reference.py).
    static int choose(Block<F> &block, int before) {
        split(block);
        take_exponents<F>(block.old, block.exponent);
        memset(block.need, 0, sizeof block.need);
        for (int k = 0; k < F::BYTES; k++)
            for (int64_t g = 0; g < GROUPS; g++) lengths(block.bytes[k] + 64 * g, 8 * k, block.need + 64 * g);
        for (int64_t i = 0; i < BLOCK; i++) {
            uint8_t need = static_cast<uint8_t>(block.need[i] + block.exponent[i]);
            block.need[i] = block.need[i] ? need < block.exponent[i] ? 255 : need : 0;
        }
        auto enough = [&](int step) {
            int longer = static_cast<int>(block.count) - block.count_above(block.exponent, step + 1);
            return 2 * longer >= 3 * block.count_above(block.need, step);
        };
        int step = before;
        if (enough(step)) while (step > 0 && enough(step - 1)) step--;
        else while (step < 254 && !enough(step)) step++;
        return step;
    }

    static void set_widths(Block<F> &block, int step) {
        const uint8_t limit = static_cast<uint8_t>(step);
        for (int64_t i = 0; i < BLOCK; i++) {
            uint8_t below = block.exponent[i] < limit ? block.exponent[i] : limit;
            uint8_t width = static_cast<uint8_t>(limit - below);
            block.width[i] = width > WIDEST ? WIDEST : width;
        }
    }

    // The elements far above the step. Eight neighbors share a bit that says whether one of them changed.
    static uint64_t quiet(const Block<F> &block, int64_t g, int step) {
        int limit = static_cast<int>(smaller(step + QUIET - 1, 255));
        return above(block.exponent + 64 * g, limit) & block.valid[g];
    }

    static Writer write(Writer out, Block<F> &block, int step) {
        set_widths(block, step);
        for (int64_t i = 0; i < BLOCK; i++) {
            Word quotient = shifted_right(block.code[i], block.width[i]);
            bool escaped = quotient >= ESCAPE;
            block.head[i] = escaped ? ESCAPE : static_cast<uint8_t>(quotient);
            block.quotient[i] = block.code[i];
            block.width[i] = escaped ? 0 : block.width[i];
        }
        uint64_t mask[GROUPS];
        for (int64_t g = 0; g < GROUPS; g++) {
            uint64_t silent = quiet(block, g, step), there = occupied(silent);
            uint64_t hit = occupied(above(block.head + 64 * g, 0) & silent);
            out.put(extract(hit, there), ones(there));
            mask[g] = (block.valid[g] & ~silent) | (silent & hit * 255);
        }
        out = write_unary(out, block.head, 0, mask);
        out = write_escaped(out, block, QUOTIENT_BITS);
        return write_low(out, block, 0);
    }

    static Reader read(Reader in, Block<F> &block, int step) {
        take_exponents<F>(block.old, block.exponent);
        set_widths(block, step);
        memset(block.head, 0, sizeof block.head);
        uint64_t mask[GROUPS];
        for (int64_t g = 0; g < GROUPS; g++) {
            uint64_t silent = quiet(block, g, step), there = occupied(silent);
            uint64_t hit = deposit(in.take(ones(there)), there);
            mask[g] = (block.valid[g] & ~silent) | (silent & hit * 255);
        }
        in = read_unary(in, block.head, 0, mask);
        for (int64_t i = 0; i < BLOCK; i++) {
            block.quotient[i] = block.head[i];
            block.width[i] = block.head[i] == ESCAPE ? 0 : block.width[i];
        }
        in = read_escaped(in, block, QUOTIENT_BITS);
        memset(block.bytes, 0, sizeof block.bytes);
        in = read_low(in, block, 0);
        join(block);
        for (int64_t i = 0; i < BLOCK; i++) {
            Word code = block.code[i], step = static_cast<Word>(code >> 1) ^ static_cast<Word>(-(code & 1));
            block.now[i] = ordered(ordered(block.old[i]) + step);
        }
        return in;
    }
};

// ---- Values: the code has the exponent on top, then the mantissa, then the sign ----

template <class F>
struct Value {
    using Word = typename F::Word;
    static constexpr int WIDTH = F::MANTISSA + 1, QUOTIENT_BITS = F::BITS - WIDTH, WHOLE = WIDTH / 8;

    static bool prepare(Block<F> &block) {
        Word any = 0;
        for (int64_t i = 0; i < BLOCK; i++) {
            Word x = block.now[i];
            any |= x;
            block.code[i] = static_cast<Word>(x << 1) | static_cast<Word>(x >> (F::BITS - 1));
        }
        return any;
    }

    // The least exponent that at most an eighth of the elements exceeds. NaN of the largest one still have a code.
    static int choose(Block<F> &block, int before) {
        split(block);
        take_exponents<F>(block.now, block.exponent);
        auto enough = [&](int top) { return 8 * block.count_above(block.exponent, top) <= block.count; };
        int top = before;
        if (enough(top)) while (top > 0 && enough(top - 1)) top--;
        else while (top < 254 && !enough(top)) top++;
        return top;
    }

    static Writer write(Writer out, Block<F> &block, int top) {
        const uint8_t least = static_cast<uint8_t>(top);
        for (int64_t i = 0; i < BLOCK; i++) {
            uint8_t exponent = block.exponent[i], below = static_cast<uint8_t>(least - exponent);
            uint8_t head = below < 5 ? below : below < ESCAPE - 1 ? static_cast<uint8_t>(below + 1) : ESCAPE;
            head = exponent > least ? ESCAPE : head;  // `below` has wrapped
            block.head[i] = exponent == static_cast<uint8_t>(least + 1) ? 5 : head;
            block.quotient[i] = exponent;
        }
        memset(block.width, WIDTH, sizeof block.width);
        for (int k = 0; k < WHOLE; k++) out.put(block.bytes[k], block.count);
        uint64_t rest[GROUPS];
        for (int bit = 0; bit < 2; bit++)
            for (int64_t g = 0; g < GROUPS; g++) {
                const uint8_t *head = block.head + 64 * g;
                rest[g] = above(head, SYMBOLS - 1) & block.valid[g];
                out.put((bit_of(head, bit) | rest[g]) & block.valid[g], ones(block.valid[g]));
            }
        out = write_unary(out, block.head, SYMBOLS, rest);
        out = write_escaped(out, block, QUOTIENT_BITS);
        return write_low(out, block, 8 * WHOLE);
    }

    static Reader read(Reader in, Block<F> &block, int top) {
        memset(block.head, 0, sizeof block.head);
        memset(block.bytes, 0, sizeof block.bytes);
        memset(block.width, WIDTH, sizeof block.width);
        for (int k = 0; k < WHOLE; k++) in.take(block.bytes[k], block.count);
        uint64_t rest[GROUPS] = {};
        for (int bit = 0; bit < 2; bit++)
            for (int64_t g = 0; g < GROUPS; g++) {
                uint64_t bits = in.take(ones(block.valid[g])) & block.valid[g];
                add(bits, 1 << bit, block.head + 64 * g);
                rest[g] = bit ? bits & rest[g] : bits;
            }
        in = read_unary(in, block.head, SYMBOLS, rest);
        const uint8_t least = static_cast<uint8_t>(top);
        for (int64_t i = 0; i < BLOCK; i++) {
            uint8_t head = block.head[i], below = head < 5 ? head : static_cast<uint8_t>(head - 1);
            below = head == 5 ? 255 : below;
            block.quotient[i] = static_cast<uint8_t>(least - below);
        }
        in = read_escaped(in, block, QUOTIENT_BITS);
        in = read_low(in, block, 8 * WHOLE);
        join(block);
        for (int64_t i = 0; i < BLOCK; i++) {
            Word code = block.code[i];
            block.now[i] = static_cast<Word>(code >> 1) | static_cast<Word>(code << (F::BITS - 1));
        }
        return in;
    }
};

// ---- Messages ----

template <class F, template <class> class Codec>
int64_t encode_blocks(const uint8_t *old, const uint8_t *values, int64_t elements, uint8_t *out) {
    alignas(64) uint8_t scratch[F::MOST];
    Block<F> block;
    memset(&block, 0, sizeof block);
    int64_t blocks = (elements + BLOCK - 1) / BLOCK;
    uint8_t *to = out + ENTRY * blocks;
    const uint8_t *end = to + elements * F::BYTES;
    int parameter = F::TOP / 2;
    for (int64_t b = 0; b < blocks; b++) {
        block.set_count(smaller(BLOCK, elements - b * BLOCK));
        int64_t at = b * BLOCK * F::BYTES, raw = block.raw(), length = 0;
        block.take(values + at, block.now);
        if (old) block.take(old + at, block.old);
        if (Codec<F>::prepare(block)) {
            parameter = Codec<F>::choose(block, parameter);
            uint8_t *place = end - to < F::MOST ? scratch : to;
            length = smaller(Codec<F>::write(Writer(place), block, parameter).bytes(), raw);
            if (length == raw) memcpy(to, values + at, raw);
            else if (place == scratch) memcpy(to, scratch, length);
        }
        uint32_t entry = static_cast<uint32_t>(length | (length && length < raw ? parameter << 16 : 0));
        memcpy(out + ENTRY * b, &entry, sizeof entry);
        to += length;
    }
    return to - out;
}

template <class F, template <class> class Codec>
bool decode_blocks(const uint8_t *from, int64_t bytes, uint8_t *values, int64_t elements, bool difference) {
    alignas(64) uint8_t scratch[F::MOST];
    Block<F> block;
    memset(&block, 0, sizeof block);
    memset(scratch, 0, sizeof scratch);
    int64_t blocks = (elements + BLOCK - 1) / BLOCK, offset = ENTRY * blocks;
    if (offset > bytes) return false;
    for (int64_t b = 0; b < blocks; b++) {
        uint32_t entry;
        memcpy(&entry, from + ENTRY * b, sizeof entry);
        block.set_count(smaller(BLOCK, elements - b * BLOCK));
        int64_t raw = block.raw(), length = entry & 0xffff;
        uint8_t *to = values + b * BLOCK * F::BYTES;
        if (length > raw || length > bytes - offset) return false;
        if (length == raw) {
            memcpy(to, from + offset, raw);
        } else if (length == 0) {
            if (!difference) memset(to, 0, raw);
        } else {
            // Whatever bits a message has, reading a block does not pass MOST bytes.
            const uint8_t *place = from + offset;
            if (bytes - offset < F::MOST) place = static_cast<const uint8_t *>(memcpy(scratch, place, length));
            if (difference) block.take(to, block.old);
            Reader in = Codec<F>::read(Reader(place), block, entry >> 16 & 0xff);
            if (in.bytes() != length) return false;
            memcpy(to, block.now, raw);
        }
        offset += length;
    }
    return bytes - offset < 8;  // the rest fills up a word
}

template <class F>
int64_t encode_as(const uint8_t *old, const uint8_t *values, int64_t elements, uint8_t *out) {
    return old ? encode_blocks<F, Difference>(old, values, elements, out)
               : encode_blocks<F, Value>(old, values, elements, out);
}

int64_t encode(Dtype dtype, const uint8_t *old, const uint8_t *values, int64_t elements, uint8_t *out) {
    switch (dtype) {
        case Dtype::bfloat16: return encode_as<BFloat16>(old, values, elements, out);
        case Dtype::float16: return encode_as<Float16>(old, values, elements, out);
        default: return encode_as<Float32>(old, values, elements, out);
    }
}

template <class F>
bool decode_as(bool difference, const uint8_t *from, int64_t bytes, uint8_t *values, int64_t elements) {
    return difference ? decode_blocks<F, Difference>(from, bytes, values, elements, true)
                      : decode_blocks<F, Value>(from, bytes, values, elements, false);
}

bool decode(Dtype dtype, bool difference, const uint8_t *from, int64_t bytes, uint8_t *values, int64_t elements) {
    switch (dtype) {
        case Dtype::bfloat16: return decode_as<BFloat16>(difference, from, bytes, values, elements);
        case Dtype::float16: return decode_as<Float16>(difference, from, bytes, values, elements);
        default: return decode_as<Float32>(difference, from, bytes, values, elements);
    }
}

constexpr uint64_t KEY = 0x9e3779b97f4a7c15;

inline uint64_t mixed(uint64_t word, uint64_t number) {
    uint64_t x = word + number * KEY;
    return (x & 0xffffffff) * (x >> 32);
}

// The sum over all words of the product of the halves of (word + number * KEY).
uint64_t digest(const uint8_t *from, int64_t bytes, int64_t first) {
    int64_t words = bytes / 8, i = 0;
    uint64_t sum = 0, number = static_cast<uint64_t>(first) + 1;
#if defined __AVX2__
    __m256i sums[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    __m256i key = _mm256_setr_epi64x(number * KEY, (number + 1) * KEY, (number + 2) * KEY, (number + 3) * KEY);
    const __m256i step = _mm256_set1_epi64x(static_cast<int64_t>(4 * KEY));
    for (; i + 8 <= words; i += 8)
        for (int half = 0; half < 2; half++) {
            const uint8_t *at = from + 8 * i + 32 * half;
            __m256i x = _mm256_add_epi64(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(at)), key);
            key = _mm256_add_epi64(key, step);
            sums[half] = _mm256_add_epi64(sums[half], _mm256_mul_epu32(x, _mm256_srli_epi64(x, 32)));
        }
    alignas(32) uint64_t parts[4];
    _mm256_store_si256(reinterpret_cast<__m256i *>(parts), _mm256_add_epi64(sums[0], sums[1]));
    sum = parts[0] + parts[1] + parts[2] + parts[3];
#endif
    for (; i < words; i++) sum += mixed(load(from + 8 * i), number + static_cast<uint64_t>(i));
    if (bytes % 8) {
        uint64_t word = 0;
        memcpy(&word, from + 8 * words, bytes % 8);
        sum += mixed(word, number + static_cast<uint64_t>(words));
    }
    return sum;
}

}  // namespace

const Kernels TOWPATH_LEVEL = {TOWPATH_LEVEL_NAME, digest, encode, decode};

}  // namespace towpath::exact
