// The codecs, equal to reference.py to the bit. Compiled once for each processor level, under the name TOWPATH_LEVEL.
//
// A message is worked on tile by tile, in memory of the first cache level: elements are read once, and results written
// once (where all elements share one scale they are read twice: it has to be known first). The loops are plain, and for
// the compiler to vectorise. Everything but the table of functions at the end is in an unnamed namespace, and nothing
// of the standard library's is instantiated: else the linker might keep, for all levels, the copy of a function that
// only the newest processors run.

#include "codec.hpp"

#include <cstring>
#include <utility>
#if defined __AVX2__ || defined __F16C__
#include <immintrin.h>
#endif
// What compilers make of conversions between widths is good with AVX-512, and slow without.
#if defined __AVX2__ && !defined __AVX512F__
#define TOWPATH_CONVERT_BY_HAND
#endif

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "messages are little-endian");

namespace towpath {
namespace {

constexpr int64_t ROTATED = 32;
constexpr int64_t TILE = 1024, LARGEST_BLOCK = 4096;
constexpr int32_t SMALLEST_NORMAL = 0x00800000, INFINITE = 0x7f800000, NOT_A_NUMBER = 0x7fc00000;
constexpr int32_t MAGNITUDE = 0x7fffffff;  // all bits of a float but its sign
constexpr float ROUNDER = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, found in the lowest bits

// A message starts at any byte.
typedef uint16_t __attribute__((aligned(1), may_alias)) Word;
typedef float __attribute__((aligned(1), may_alias)) Float;

inline int32_t bits_of(float x) {
    int32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

inline float float_of(int32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// ---- Narrow floats: MANTISSA bits, and an exponent biased by BIAS ----

// To nearest, ties to even. What is too large for the format gives nonsense.
template <int MANTISSA, int BIAS>
inline int32_t narrowed(int32_t magnitude) {
    constexpr int dropped = 23 - MANTISSA;
    constexpr int32_t smallest_normal = (128 - BIAS) << 23, aligner = (150 - BIAS + 1 - MANTISSA) << 23;
    int32_t odd = (magnitude >> dropped) & 1;
    int32_t normal = (magnitude + ((1 << (dropped - 1)) - 1) + odd - ((127 - BIAS) << 23)) >> dropped;
    int32_t denormal = bits_of(float_of(magnitude) + float_of(aligner)) - aligner;
    return magnitude < smallest_normal ? denormal : normal;
}

// `topmost`: from this magnitude on, a code is an infinity or NaN.
template <int MANTISSA, int BIAS>
inline float widened(int32_t code, int sign_bit, int32_t topmost) {
    int32_t magnitude = code & ((1 << sign_bit) - 1);
    int32_t normal = (magnitude << (23 - MANTISSA)) + ((127 - BIAS) << 23);
    normal |= magnitude >= topmost ? INFINITE : 0;
    int32_t denormal = bits_of(static_cast<float>(magnitude) * float_of((128 - BIAS - MANTISSA) << 23));
    return float_of((magnitude < 1 << MANTISSA ? denormal : normal) | (code >> sign_bit) << 31);
}

inline uint16_t half_of(float x) {
    int32_t bits = bits_of(x), magnitude = bits & MAGNITUDE;
    int32_t half = magnitude >= 0x477ff000 ? 0x7c00 : narrowed<10, 15>(magnitude);
    half = magnitude > INFINITE ? 0x7e00 : half;
    return static_cast<uint16_t>(half | ((bits >> 16) & 0x8000));
}

// Every NaN becomes the same one.
inline uint16_t bfloat16_of(float x) {
    int32_t bits = bits_of(x);
    int32_t rounded = static_cast<int32_t>(static_cast<uint32_t>(bits) + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return static_cast<uint16_t>((bits & MAGNITUDE) > INFINITE ? NOT_A_NUMBER >> 16 : rounded);
}

inline float value_of(float x) { return x; }
inline float value_of(uint16_t bfloat16) { return float_of(static_cast<int32_t>(uint32_t{bfloat16} << 16)); }

#ifdef TOWPATH_CONVERT_BY_HAND
inline __m256 eight_of(const float *values) { return _mm256_loadu_ps(values); }
inline __m256 eight_of(const Word *bfloat16) {
    __m128i narrow = _mm_loadu_si128(reinterpret_cast<const __m128i *>(bfloat16));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(narrow), 16));
}

// As bfloat16, in the upper half of each lane. Not for NaN.
inline __m256i rounded_to_upper_half(__m256 x) {
    __m256i bits = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
}

inline void store_upper_halves(__m256i first, __m256i second, Word *to) {
    __m256i mixed = _mm256_packus_epi32(_mm256_srli_epi32(first, 16), _mm256_srli_epi32(second, 16));
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), _mm256_permute4x64_epi64(mixed, 0xd8));
}
#endif

// ---- Elements of a dtype, to and from float32 ----

void from_bfloat16(const uint8_t *from, int64_t count, float *__restrict to) {
    const Word *elements = reinterpret_cast<const Word *>(from);
    int64_t i = 0;
#ifdef TOWPATH_CONVERT_BY_HAND
    for (; i + 8 <= count; i += 8) _mm256_storeu_ps(to + i, eight_of(elements + i));
#endif
    for (; i < count; i++) to[i] = value_of(elements[i]);
}

void to_bfloat16(const float *__restrict from, int64_t count, uint8_t *to) {
    Word *elements = reinterpret_cast<Word *>(to);
    int64_t i = 0;
#ifdef TOWPATH_CONVERT_BY_HAND
    auto eight = [](const float *values) {
        __m256 x = _mm256_loadu_ps(values), nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
        __m256 rounded = _mm256_castsi256_ps(rounded_to_upper_half(x));
        return _mm256_castps_si256(_mm256_blendv_ps(rounded, _mm256_set1_ps(float_of(NOT_A_NUMBER)), nan));
    };
    for (; i + 16 <= count; i += 16) store_upper_halves(eight(from + i), eight(from + i + 8), elements + i);
#endif
    for (; i < count; i++) elements[i] = bfloat16_of(from[i]);
}

void from_float16(const uint8_t *from, int64_t count, float *__restrict to) {
    const Word *elements = reinterpret_cast<const Word *>(from);
    int64_t i = 0;
#ifdef __F16C__
    for (; i + 8 <= count; i += 8)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(elements + i))));
#endif
    for (; i < count; i++) to[i] = widened<10, 15>(elements[i], 15, 0x7c00);
}

void to_float16(const float *__restrict from, int64_t count, uint8_t *to) {
    Word *elements = reinterpret_cast<Word *>(to);
    int64_t i = 0;
#ifdef __F16C__
    for (; i + 8 <= count; i += 8)
        _mm_storeu_si128(reinterpret_cast<__m128i *>(elements + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), 0));
#endif
    for (; i < count; i++) elements[i] = half_of(from[i]);
}

int64_t item_bytes(Dtype dtype) { return dtype == Dtype::float32 ? 4 : 2; }

// `count` elements from the `start`-th on, where they are if they are float32, else in `scratch`.
const float *loaded(Input x, int64_t start, int64_t count, float *scratch) {
    const uint8_t *from = x.at + start * item_bytes(x.dtype);
    if (x.dtype == Dtype::float32) return reinterpret_cast<const float *>(from);
    if (x.dtype == Dtype::bfloat16) from_bfloat16(from, count, scratch);
    else from_float16(from, count, scratch);
    return scratch;
}

void store(const float *values, int64_t start, int64_t count, Output out) {
    uint8_t *to = out.at + start * item_bytes(out.dtype);
    if (out.dtype == Dtype::float32) memcpy(to, values, count * sizeof(float));
    else if (out.dtype == Dtype::bfloat16) to_bfloat16(values, count, to);
    else to_float16(values, count, to);
}

// ---- Rotation and rounding ----

template <bool ADD>
inline void put(float value, float *to) {
    *to = ADD ? *to + value : value;
}

#if defined __AVX512F__
constexpr int LANES = 16;
#elif defined __AVX__
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
typedef float __attribute__((vector_size(4 * LANES))) Vector;
typedef float __attribute__((vector_size(4 * LANES), aligned(4), may_alias)) UnalignedVector;
typedef int32_t __attribute__((vector_size(4 * LANES))) Lanes;

// One step of a butterfly within a vector: lanes HALF apart become their sum and their difference.
template <int HALF, int... LANE>
inline Vector step(Vector x, std::integer_sequence<int, LANE...>) {
    constexpr Vector sign = {(LANE & HALF ? -1.0f : 1.0f)...};
#ifdef __clang__
    return __builtin_shufflevector(x, x, (LANE ^ HALF)...) + x * sign;
#else
    return __builtin_shuffle(x, Lanes{(LANE ^ HALF)...}) + x * sign;
#endif
}

template <int HALF>
inline void butterfly(Vector *x) {
    constexpr int vectors = ROTATED / LANES, apart = HALF / LANES;
    for (int i = 0; i < vectors; i++)
        if constexpr (HALF < LANES) {
            x[i] = step<HALF>(x[i], std::make_integer_sequence<int, LANES>());
        } else if (!(i & apart)) {
            Vector sum = x[i] + x[i + apart], difference = x[i] - x[i + apart];
            x[i] = sum;
            x[i + apart] = difference;
        }
}

// Each 32 elements times the orthonormal Hadamard matrix; a shorter rest as it is.
template <bool ADD>
void rotate(const float *from, int64_t count, float *to) {
    int64_t whole = count / ROTATED * ROTATED;
    for (int64_t start = 0; start < whole; start += ROTATED) {
        Vector x[ROTATED / LANES];
        for (int i = 0; i < ROTATED / LANES; i++) x[i] = reinterpret_cast<const UnalignedVector *>(from + start)[i];
        butterfly<1>(x), butterfly<2>(x), butterfly<4>(x), butterfly<8>(x), butterfly<16>(x);
        for (int i = 0; i < ROTATED / LANES; i++) {
            UnalignedVector &result = reinterpret_cast<UnalignedVector *>(to + start)[i];
            Vector turned = x[i] * 0.17677669529663687f;
            result = ADD ? result + turned : turned;
        }
    }
    for (int64_t i = whole; i < count; i++) put<ADD>(from[i], to + i);
}

// As an integer, the magnitude of an infinity is above all numbers', and that of a NaN above an infinity's.
int32_t largest_magnitude(const float *values, int64_t count) {
    int32_t largest = 0;
    for (int64_t i = 0; i < count; i++) {
        int32_t magnitude = bits_of(values[i]) & MAGNITUDE;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
}

int32_t largest_magnitude(const Word *bfloat16, int64_t count) {
    uint16_t largest = 0;
    for (int64_t i = 0; i < count; i++) {
        uint16_t magnitude = bfloat16[i] & (MAGNITUDE >> 16);
        largest = magnitude > largest ? magnitude : largest;
    }
    return int32_t{largest} << 16;
}

float largest_code(Code code) {
    switch (code) {
        case Code::int8: return 127.0f;
        case Code::int4: return 7.0f;
        case Code::e4m3: return 448.0f;
        default: return 57344.0f;
    }
}

float scale_of(const Codec &codec, int32_t largest) {
    if (largest >= INFINITE) return float_of(NOT_A_NUMBER);
    float scale = float_of(largest) / largest_code(codec.code);
    return bits_of(scale) < SMALLEST_NORMAL ? float_of(SMALLEST_NORMAL) : scale;
}

// No quotient is rounded to more than the largest code: the scale was rounded by less than that takes.
template <class Element>
void round_nearest(const Element *__restrict values, int64_t count, float scale, uint8_t *__restrict codes) {
    int64_t i = 0;
#ifdef TOWPATH_CONVERT_BY_HAND
    auto eight = [scale](const Element *from) {
        __m256 quotient = _mm256_div_ps(eight_of(from), _mm256_set1_ps(scale));
        __m256 rounded = _mm256_add_ps(quotient, _mm256_set1_ps(ROUNDER));
        return _mm256_sub_epi32(_mm256_castps_si256(rounded), _mm256_set1_epi32(bits_of(ROUNDER)));
    };
    const __m256i in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    for (; i + 32 <= count; i += 32) {
        __m256i first = _mm256_packs_epi32(eight(values + i), eight(values + i + 8));
        __m256i second = _mm256_packs_epi32(eight(values + i + 16), eight(values + i + 24));
        __m256i mixed = _mm256_packs_epi16(first, second);
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(codes + i), _mm256_permutevar8x32_epi32(mixed, in_order));
    }
#endif
    for (; i < count; i++) codes[i] = static_cast<uint8_t>(bits_of(value_of(values[i]) / scale + ROUNDER));
}

template <int MANTISSA, int BIAS, class Element>
void round_float8(const Element *__restrict values, int64_t count, float scale, uint8_t *__restrict codes) {
    for (int64_t i = 0; i < count; i++) {
        int32_t bits = bits_of(value_of(values[i]) / scale);
        codes[i] = static_cast<uint8_t>(narrowed<MANTISSA, BIAS>(bits & MAGNITUDE) | ((bits >> 24) & 0x80));
    }
}

// In [0, 1): reference.uniform.
inline float uniform(uint32_t index, uint32_t seed) {
    uint32_t mixed = index * 0x9E3779B1u + seed;
    mixed = (mixed ^ (mixed >> 16)) * 0x7FEB352Du;
    mixed = (mixed ^ (mixed >> 15)) * 0x846CA68Bu;
    return static_cast<float>(static_cast<int32_t>((mixed ^ (mixed >> 16)) >> 8)) * 0x1p-24f;
}

template <class Element>
void round_at_random(const Element *__restrict values, int64_t count, float scale, float largest, uint32_t first,
                     uint32_t seed, uint8_t *__restrict codes) {
    for (int64_t i = 0; i < count; i++) {
        float x = value_of(values[i]) / scale + uniform(first + static_cast<uint32_t>(i), seed);
        float nearest = x + ROUNDER - ROUNDER;
        float floor = nearest > x ? nearest - 1.0f : nearest;
        floor = floor > largest ? largest : floor;
        floor = floor < -largest ? -largest : floor;
        codes[i] = static_cast<uint8_t>(bits_of(floor + ROUNDER));
    }
}

// Two codes a byte, the first in the lower half.
void pack(const uint8_t *codes, int64_t count, uint8_t *__restrict out) {
    const Word *pairs = reinterpret_cast<const Word *>(codes);
    int64_t i = 0;
#ifdef TOWPATH_CONVERT_BY_HAND
    auto sixteen = [pairs](int64_t first) {
        __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(pairs + first));
        // The lower code of each pair once, the upper one sixteen times.
        return _mm256_maddubs_epi16(_mm256_and_si256(both, _mm256_set1_epi8(15)), _mm256_set1_epi16(0x1001));
    };
    for (; i + 32 <= count / 2; i += 32) {
        __m256i mixed = _mm256_packus_epi16(sixteen(i), sixteen(i + 16));
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(out + i), _mm256_permute4x64_epi64(mixed, 0xd8));
    }
#endif
    for (; i < count / 2; i++) out[i] = static_cast<uint8_t>((pairs[i] & 15) | ((pairs[i] >> 4) & 0xf0));
    if (count % 2) out[count / 2] = codes[count - 1] & 15;
}

// ---- Messages ----

struct Layout {
    int64_t block, tile, scales_bytes;

    // A tile is one block, or several whole ones; of a message with one scale, a part of its block.
    Layout(const Codec &codec, int64_t elements) {
        block = codec.block ? codec.block : elements;
        tile = codec.block > TILE ? codec.block : TILE;
        scales_bytes = elements ? (elements + block - 1) / block * 4 : 0;
    }
};

template <class Element>
void write_codes(const Codec &codec, const Element *values, int64_t start, int64_t count, float scale, uint32_t seed,
                 uint8_t *codes) {
    if (codec.code == Code::e4m3) round_float8<3, 7>(values, count, scale, codes);
    else if (codec.code == Code::e5m2) round_float8<2, 15>(values, count, scale, codes);
    else if (codec.stochastic)
        round_at_random(values, count, scale, largest_code(codec.code), static_cast<uint32_t>(start), seed, codes);
    else round_nearest(values, count, scale, codes);
}

// In the following, `source(start, count, scratch)` gives float32 elements, in the scratch or elsewhere, or bfloat16.

template <class Source>
void encode_as_bfloat16(const Source &source, const Layout &layout, int64_t elements, uint8_t *out) {
    alignas(64) float scratch[TILE];
    for (int64_t start = 0; start < elements; start += layout.tile) {
        int64_t count = smaller(layout.tile, elements - start);
        to_bfloat16(source(start, count, scratch), count, out + 2 * start);
    }
}

template <class Source>
int32_t largest_of_all(const Source &source, const Layout &layout, int64_t elements) {
    alignas(64) float scratch[TILE];
    int32_t largest = 0;
    for (int64_t start = 0; start < elements; start += layout.tile) {
        int64_t count = smaller(layout.tile, elements - start);
        int32_t magnitude = largest_magnitude(source(start, count, scratch), count);
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
}

template <class Source>
void encode_scaled(const Source &source, const Codec &codec, int64_t elements, uint8_t *out, uint32_t seed) {
    Layout layout(codec, elements);
    alignas(64) float scratch[LARGEST_BLOCK];
    alignas(64) uint8_t unpacked[LARGEST_BLOCK];
    Float *scales = reinterpret_cast<Float *>(out);
    uint8_t *codes = out + layout.scales_bytes;
    int32_t largest = codec.block ? 0 : largest_of_all(source, layout, elements);
    for (int64_t start = 0; start < elements; start += layout.tile) {
        int64_t in_tile = smaller(layout.tile, elements - start);
        const auto *values = source(start, in_tile, scratch);
        uint8_t *to = codec.code == Code::int4 ? unpacked : codes + start;
        for (int64_t begin = 0; begin < in_tile; begin += layout.block) {
            int64_t count = smaller(layout.block, in_tile - begin);
            if (codec.block) largest = largest_magnitude(values + begin, count);
            float scale = scale_of(codec, largest);
            scales[(start + begin) / layout.block] = scale;
            if (scale != scale) memset(to + begin, 0, count);
            else write_codes(codec, values + begin, start + begin, count, scale, seed, to + begin);
        }
        if (codec.code == Code::int4) pack(unpacked, in_tile, codes + start / 2);
    }
}

template <class Source>
void encode_from(const Source &source, const Codec &codec, int64_t elements, uint8_t *out, uint32_t seed) {
    if (codec.code == Code::bf16) encode_as_bfloat16(source, Layout(codec, elements), elements, out);
    else encode_scaled(source, codec, elements, out, seed);
}

void encode(const Codec &codec, Input x, int64_t elements, uint8_t *out, uint32_t seed) {
    if (codec.hadamard) {
        auto source = [x](int64_t start, int64_t count, float *scratch) {
            rotate<false>(loaded(x, start, count, scratch), count, scratch);
            return static_cast<const float *>(scratch);
        };
        encode_from(source, codec, elements, out, seed);
    } else if (x.dtype == Dtype::bfloat16 && codec.code != Code::bf16) {
        auto source = [x](int64_t start, int64_t, float *) { return reinterpret_cast<const Word *>(x.at) + start; };
        encode_scaled(source, codec, elements, out, seed);
    } else {
        auto source = [x](int64_t start, int64_t count, float *scratch) { return loaded(x, start, count, scratch); };
        encode_from(source, codec, elements, out, seed);
    }
}

template <bool ADD>
void read_int8(const uint8_t *__restrict codes, int64_t count, float scale, float *__restrict to) {
    int64_t i = 0;
#ifdef TOWPATH_CONVERT_BY_HAND
    for (; i + 8 <= count; i += 8) {
        __m128i eight = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(codes + i));
        __m256 value = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight)), _mm256_set1_ps(scale));
        _mm256_storeu_ps(to + i, ADD ? _mm256_add_ps(_mm256_loadu_ps(to + i), value) : value);
    }
#endif
    for (; i < count; i++) put<ADD>(static_cast<float>(static_cast<int8_t>(codes[i])) * scale, to + i);
}

template <bool ADD, int MANTISSA, int BIAS>
void read_float8(const uint8_t *__restrict codes, int64_t count, float scale, int32_t topmost, float *__restrict to) {
    for (int64_t i = 0; i < count; i++) put<ADD>(widened<MANTISSA, BIAS>(codes[i], 7, topmost) * scale, to + i);
}

// The inverse of `pack`, as int8: 30 times its sign bit fills up the upper half of a byte.
void unpack(const uint8_t *__restrict packed, int64_t count, uint8_t *codes) {
    Word *pairs = reinterpret_cast<Word *>(codes);
    int64_t i = 0;
#ifdef TOWPATH_CONVERT_BY_HAND
    auto extended = [](__m128i half) {
        const __m128i sign = _mm_set1_epi8(8);
        return _mm_sub_epi8(_mm_xor_si128(_mm_and_si128(half, _mm_set1_epi8(15)), sign), sign);
    };
    for (; i + 16 <= count / 2; i += 16) {
        __m128i both = _mm_loadu_si128(reinterpret_cast<const __m128i *>(packed + i));
        __m128i lower = extended(both), upper = extended(_mm_srli_epi16(both, 4));
        __m128i *to = reinterpret_cast<__m128i *>(pairs + i);
        _mm_storeu_si128(to, _mm_unpacklo_epi8(lower, upper));
        _mm_storeu_si128(to + 1, _mm_unpackhi_epi8(lower, upper));
    }
#endif
    for (; i < (count + 1) / 2; i++) {
        int32_t pair = (packed[i] | packed[i] << 4) & 0x0f0f;
        pairs[i] = static_cast<uint16_t>(pair | (pair & 0x0808) * 30);
    }
}

template <bool ADD>
void read_block(Code code, const uint8_t *codes, int64_t count, float scale, float *to) {
    switch (code) {
        case Code::int4:
        case Code::int8: return read_int8<ADD>(codes, count, scale, to);
        case Code::e4m3: return read_float8<ADD, 3, 7>(codes, count, scale, 0x7f, to);
        default: return read_float8<ADD, 2, 15>(codes, count, scale, 0x7c, to);
    }
}

// `count` elements of a message from the `start`-th on, which begins a tile.
template <bool ADD>
void read_tile(const Codec &codec, const Layout &layout, const uint8_t *row, int64_t start, int64_t count, float *to) {
    alignas(64) float scratch[LARGEST_BLOCK];
    if (codec.code == Code::bf16) {
        from_bfloat16(row + 2 * start, count, ADD ? scratch : to);
        for (int64_t i = 0; ADD && i < count; i++) to[i] += scratch[i];
    } else if (codec.hadamard) {
        Codec plain = codec;
        plain.hadamard = false;
        read_tile<false>(plain, layout, row, start, count, scratch);
        rotate<ADD>(scratch, count, to);
    } else {
        const Float *scales = reinterpret_cast<const Float *>(row);
        const uint8_t *codes = row + layout.scales_bytes + start;
        alignas(64) uint8_t unpacked[LARGEST_BLOCK];
        if (codec.code == Code::int4) {
            unpack(row + layout.scales_bytes + start / 2, count, unpacked);
            codes = unpacked;
        }
        for (int64_t begin = 0; begin < count; begin += layout.block)
            read_block<ADD>(codec.code, codes + begin, smaller(layout.block, count - begin),
                            scales[(start + begin) / layout.block], to + begin);
    }
}

void sum_tile(const Codec &codec, const Layout &layout, Rows rows, int64_t start, int64_t count, float *to) {
    read_tile<false>(codec, layout, rows.at[0], start, count, to);
    for (int64_t row = 1; row < rows.count; row++) read_tile<true>(codec, layout, rows.at[row], start, count, to);
}

#ifdef TOWPATH_CONVERT_BY_HAND
void int8_to_bfloat16(const uint8_t *codes, int64_t count, float scale, Word *to) {
    int64_t i = 0;
    bool finite = (bits_of(scale) & MAGNITUDE) < INFINITE;  // else there are NaN
    auto eight = [codes, scale](int64_t first) {
        __m128i narrow = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(codes + first));
        __m256 value = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(narrow)), _mm256_set1_ps(scale));
        return rounded_to_upper_half(value);
    };
    for (; finite && i + 16 <= count; i += 16) store_upper_halves(eight(i), eight(i + 8), to + i);
    for (; i < count; i++) to[i] = bfloat16_of(static_cast<float>(static_cast<int8_t>(codes[i])) * scale);
}

// The sixteen values there are in a block of int4 fill one vector with their lower bytes and one with their upper ones.
void int4_to_narrow(const uint8_t *packed, int64_t count, float scale, Output out) {
    alignas(16) const uint8_t codes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 0xf8, 0xf9, 0xfa, 0xfb, 0xfc, 0xfd, 0xfe, 0xff};
    alignas(32) float values[16];
    alignas(32) uint16_t narrow[16];
    read_int8<false>(codes, 16, scale, values);
    if (out.dtype == Dtype::bfloat16) to_bfloat16(values, 16, reinterpret_cast<uint8_t *>(narrow));
    else to_float16(values, 16, reinterpret_cast<uint8_t *>(narrow));
    const __m128i *both = reinterpret_cast<const __m128i *>(narrow);
    const __m128i low = _mm_set1_epi16(255), nibble = _mm_set1_epi8(15);
    const __m128i lower = _mm_packus_epi16(_mm_and_si128(both[0], low), _mm_and_si128(both[1], low));
    const __m128i upper = _mm_packus_epi16(_mm_srli_epi16(both[0], 8), _mm_srli_epi16(both[1], 8));
    Word *to = reinterpret_cast<Word *>(out.at);
    auto sixteen = [lower, upper](__m128i indices, Word *at) {
        __m128i first = _mm_shuffle_epi8(lower, indices), second = _mm_shuffle_epi8(upper, indices);
        _mm_storeu_si128(reinterpret_cast<__m128i *>(at), _mm_unpacklo_epi8(first, second));
        _mm_storeu_si128(reinterpret_cast<__m128i *>(at + 8), _mm_unpackhi_epi8(first, second));
    };
    int64_t i = 0;
    for (; i + 32 <= count; i += 32) {
        __m128i pairs = _mm_loadu_si128(reinterpret_cast<const __m128i *>(packed + i / 2));
        __m128i even = _mm_and_si128(pairs, nibble), odd = _mm_and_si128(_mm_srli_epi16(pairs, 4), nibble);
        sixteen(_mm_unpacklo_epi8(even, odd), to + i);
        sixteen(_mm_unpackhi_epi8(even, odd), to + i + 16);
    }
    for (; i < count; i++) to[i] = narrow[(packed[i / 2] >> (i % 2 * 4)) & 15];
}

// One message, straight into elements of 16 bits; whether this is what was asked for.
bool decode_narrow(const Codec &codec, const Layout &layout, const uint8_t *row, int64_t elements, Output out) {
    bool int8 = codec.code == Code::int8 && out.dtype == Dtype::bfloat16;
    bool int4 = codec.code == Code::int4 && out.dtype != Dtype::float32;
    if (codec.hadamard || !(int8 || int4)) return false;
    const Float *scales = reinterpret_cast<const Float *>(row);
    const uint8_t *codes = row + layout.scales_bytes;
    for (int64_t start = 0; start < elements; start += layout.block) {
        int64_t count = smaller(layout.block, elements - start);
        float scale = scales[start / layout.block];
        uint8_t *to = out.at + 2 * start;
        if (int8) int8_to_bfloat16(codes + start, count, scale, reinterpret_cast<Word *>(to));
        else int4_to_narrow(codes + start / 2, count, scale, {to, out.dtype});
    }
    return true;
}
#endif

void decode_sum(const Codec &codec, Rows rows, int64_t elements, Output out) {
    alignas(64) float scratch[LARGEST_BLOCK];
    Layout layout(codec, elements);
#ifdef TOWPATH_CONVERT_BY_HAND
    if (rows.count == 1 && decode_narrow(codec, layout, rows.at[0], elements, out)) return;
#endif
    for (int64_t start = 0; start < elements; start += layout.tile) {
        int64_t count = smaller(layout.tile, elements - start);
        if (out.dtype == Dtype::float32) {
            sum_tile(codec, layout, rows, start, count, reinterpret_cast<float *>(out.at) + start);
        } else {
            sum_tile(codec, layout, rows, start, count, scratch);
            store(scratch, start, count, out);
        }
    }
}

void decode_sum_encode(const Codec &codec, Rows rows, int64_t elements, uint8_t *out, uint32_t seed) {
    Layout layout(codec, elements);
    auto source = [&](int64_t start, int64_t count, float *scratch) {
        sum_tile(codec, layout, rows, start, count, scratch);
        if (codec.hadamard) rotate<false>(scratch, count, scratch);
        return static_cast<const float *>(scratch);
    };
    encode_from(source, codec, elements, out, seed);
}

}  // namespace

const Kernels TOWPATH_LEVEL = {TOWPATH_LEVEL_NAME, encode, decode_sum, decode_sum_encode};

}  // namespace towpath
