// Bits of 64 elements at a time, and bits one after another, for the processor level that a file is compiled for. All of
// it is in an unnamed namespace, so that each level has its own.
#pragma once

#include <cstdint>
#include <cstring>
#if defined __AVX2__
#include <immintrin.h>
#endif

namespace towpath::exact {
namespace {

constexpr uint64_t ONES = 0x0101010101010101, TOPS = ONES << 7;

inline uint64_t load(const uint8_t *from) {
    uint64_t word;
    memcpy(&word, from, sizeof word);
    return word;
}

inline void store(uint64_t word, uint8_t *to) { memcpy(to, &word, sizeof word); }

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int ones(uint64_t word) { return __builtin_popcountll(word); }

// The lowest bit of each byte that is not zero.
inline uint64_t occupied(uint64_t word) { return ((((word & ~TOPS) + ~TOPS) | word) >> 7) & ONES; }

// ---- 64 elements at a time ----

#if defined __AVX512BW__

inline uint64_t bit_of(const uint8_t *bytes, int bit) {
    return _mm512_test_epi8_mask(_mm512_load_si512(bytes), _mm512_set1_epi8(static_cast<char>(1 << bit)));
}

inline uint64_t above(const uint8_t *bytes, int limit) {
    return _mm512_cmpgt_epu8_mask(_mm512_load_si512(bytes), _mm512_set1_epi8(static_cast<char>(limit)));
}

inline void add(uint64_t bits, int value, uint8_t *bytes) {
    __m512i x = _mm512_load_si512(bytes);
    _mm512_store_si512(bytes, _mm512_mask_add_epi8(x, bits, x, _mm512_set1_epi8(static_cast<char>(value))));
}

// Where a byte is not zero, the length of its number in bits and `before` bits more.
inline void lengths(const uint8_t *bytes, int before, uint8_t *to) {
    const __m512i upper = _mm512_set4_epi32(0x08080808, 0x08080808, 0x07070707, 0x06060500);
    const __m512i lower = _mm512_set4_epi32(0x04040404, 0x04040404, 0x03030303, 0x02020100);
    const __m512i nibble = _mm512_set1_epi8(15);
    __m512i x = _mm512_load_si512(bytes), high = _mm512_and_si512(_mm512_srli_epi16(x, 4), nibble);
    __m512i length = _mm512_max_epu8(_mm512_shuffle_epi8(upper, high),
                                     _mm512_shuffle_epi8(lower, _mm512_and_si512(x, nibble)));
    length = _mm512_add_epi8(length, _mm512_set1_epi8(static_cast<char>(before)));
    _mm512_mask_storeu_epi8(to, _mm512_test_epi8_mask(x, x), length);
}

#elif defined __AVX2__

inline uint64_t tops_of(__m256i first, __m256i second) {
    return static_cast<uint32_t>(_mm256_movemask_epi8(first)) |
           static_cast<uint64_t>(static_cast<uint32_t>(_mm256_movemask_epi8(second))) << 32;
}

inline __m256i half(const uint8_t *bytes, int which) {
    return _mm256_load_si256(reinterpret_cast<const __m256i *>(bytes) + which);
}

inline uint64_t bit_of(const uint8_t *bytes, int bit) {
    __m128i shift = _mm_cvtsi32_si128(7 - bit);
    return tops_of(_mm256_sll_epi16(half(bytes, 0), shift), _mm256_sll_epi16(half(bytes, 1), shift));
}

inline uint64_t above(const uint8_t *bytes, int limit) {
    if (limit >= 255) return 0;
    __m256i least = _mm256_set1_epi8(static_cast<char>(limit + 1));
    __m256i first = half(bytes, 0), second = half(bytes, 1);
    return tops_of(_mm256_cmpeq_epi8(_mm256_max_epu8(first, least), first),
                   _mm256_cmpeq_epi8(_mm256_max_epu8(second, least), second));
}

inline void add(uint64_t bits, int value, uint8_t *bytes) {
    const __m256i each = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201));
    const __m256i spread = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1,  //
                                            2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
    for (int i = 0; i < 2; i++) {
        __m256i word = _mm256_set1_epi32(static_cast<int>(bits >> (32 * i)));
        __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(_mm256_shuffle_epi8(word, spread), each), each);
        __m256i term = _mm256_and_si256(set, _mm256_set1_epi8(static_cast<char>(value)));
        _mm256_store_si256(reinterpret_cast<__m256i *>(bytes) + i, _mm256_add_epi8(half(bytes, i), term));
    }
}

inline void lengths(const uint8_t *bytes, int before, uint8_t *to) {
    const __m256i upper = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 5, 6, 6, 7, 7, 7, 7, 8, 8, 8, 8, 8, 8, 8, 8));
    const __m256i lower = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 4, 4, 4, 4));
    const __m256i nibble = _mm256_set1_epi8(15);
    for (int i = 0; i < 2; i++) {
        __m256i x = half(bytes, i), high = _mm256_and_si256(_mm256_srli_epi16(x, 4), nibble);
        __m256i length = _mm256_max_epu8(_mm256_shuffle_epi8(upper, high),
                                         _mm256_shuffle_epi8(lower, _mm256_and_si256(x, nibble)));
        length = _mm256_add_epi8(length, _mm256_set1_epi8(static_cast<char>(before)));
        __m256i none = _mm256_cmpeq_epi8(x, _mm256_setzero_si256());
        _mm256_store_si256(reinterpret_cast<__m256i *>(to) + i, _mm256_blendv_epi8(length, half(to, i), none));
    }
}

#else

// The lowest bit of each byte, next to each other.
inline uint64_t gathered(uint64_t lowest) { return (lowest * 0x0102040810204080) >> 56; }

inline uint64_t bit_of(const uint8_t *bytes, int bit) {
    uint64_t bits = 0;
    for (int i = 0; i < 8; i++) bits |= gathered((load(bytes + 8 * i) >> bit) & ONES) << (8 * i);
    return bits;
}

inline uint64_t above(const uint8_t *bytes, int limit) {
    uint64_t bits = 0;
    for (int i = 0; i < 8; i++) {
        uint64_t x = load(bytes + 8 * i), lower = (x & ~TOPS) + (127 - (limit & 127)) * ONES;
        bits |= gathered(((limit < 128 ? lower | x : lower & x) >> 7) & ONES) << (8 * i);
    }
    return bits;
}

inline void add(uint64_t bits, int value, uint8_t *bytes) {
    for (int i = 0; i < 8; i++) {
        uint64_t each = ((bits >> (8 * i)) & 255) * ONES & 0x8040201008040201;
        // Bytes do not carry into each other: an element gets each bit of its code once.
        store(load(bytes + 8 * i) + occupied(each) * static_cast<unsigned>(value), bytes + 8 * i);
    }
}

inline void lengths(const uint8_t *bytes, int before, uint8_t *to) {
    for (int i = 0; i < 64; i++)
        if (bytes[i]) to[i] = static_cast<uint8_t>(before + 32 - __builtin_clz(bytes[i]));
}

#endif

// Shifts by another number of bits for each element. AVX2 has none for 16 bits.
#if defined __AVX2__ && !defined __AVX512BW__
inline uint16_t shifted_right(uint16_t x, uint16_t by) {
    x = by & 8 ? x >> 8 : x;
    x = by & 4 ? x >> 4 : x;
    x = by & 2 ? x >> 2 : x;
    return by & 1 ? x >> 1 : x;
}
inline uint16_t shifted_left(uint16_t x, uint16_t by) {
    x = by & 8 ? static_cast<uint16_t>(x << 8) : x;
    x = by & 4 ? static_cast<uint16_t>(x << 4) : x;
    x = by & 2 ? static_cast<uint16_t>(x << 2) : x;
    return by & 1 ? static_cast<uint16_t>(x << 1) : x;
}
#else
inline uint16_t shifted_right(uint16_t x, uint16_t by) { return static_cast<uint16_t>(x >> by); }
inline uint16_t shifted_left(uint16_t x, uint16_t by) { return static_cast<uint16_t>(x << by); }
#endif
inline uint32_t shifted_right(uint32_t x, uint16_t by) { return x >> by; }
inline uint32_t shifted_left(uint32_t x, uint16_t by) { return x << by; }

#if defined __BMI2__

inline uint64_t extract(uint64_t word, uint64_t mask) { return _pext_u64(word, mask); }
inline uint64_t deposit(uint64_t word, uint64_t mask) { return _pdep_u64(word, mask); }

#else

inline uint64_t extract(uint64_t word, uint64_t mask) {
    if (mask == ~uint64_t{0}) return word;
    uint64_t found = 0;
    for (int at = 0; mask; mask &= mask - 1, at++) found |= ((word >> __builtin_ctzll(mask)) & 1) << at;
    return found;
}

inline uint64_t deposit(uint64_t word, uint64_t mask) {
    if (mask == ~uint64_t{0}) return word;
    uint64_t found = 0;
    for (; mask; mask &= mask - 1, word >>= 1) found |= (mask & -mask) * (word & 1);
    return found;
}

#endif

// ---- Bits one after another ----

class Writer {
  public:
    explicit Writer(uint8_t *to) : to(to) {}

    // `word` has no bits from `count` on.
    void put(uint64_t word, int count) {
        uint64_t fill = bits & 63;
        last |= word << fill;
        store(last, to + bits / 64 * 8);
        bits += count;
        if (fill + count >= 64) last = (word >> 1) >> (63 - fill);
    }

    // Whole bytes, while there have been no others.
    void put(const uint8_t *from, int64_t count) {
        memcpy(to + bits / 8, from, count);
        bits += 8 * static_cast<uint64_t>(count);
        last = 0;
        if (bits % 64) memcpy(&last, to + bits / 64 * 8, bits % 64 / 8);
    }

    int64_t bytes() {
        store(last, to + bits / 64 * 8);
        return static_cast<int64_t>((bits + 7) / 8);
    }

  private:
    uint8_t *to;
    uint64_t last = 0;
    uint64_t bits = 0;
};

class Reader {
  public:
    explicit Reader(const uint8_t *from) : from(from) {}

    // The next `count` bits; those above them are not zero.
    uint64_t take(int count) {
        const uint8_t *at = from + bits / 8;
        uint64_t skip = bits & 7;
        bits += count;
        return load(at) >> skip | (load(at + 8) << 1) << (63 - skip);
    }

    void take(uint8_t *to, int64_t count) {
        memcpy(to, from + bits / 8, count);
        bits += 8 * static_cast<uint64_t>(count);
    }

    int64_t bytes() const { return static_cast<int64_t>((bits + 7) / 8); }

  private:
    const uint8_t *from;
    uint64_t bits = 0;
};

}  // namespace
}  // namespace towpath::exact
