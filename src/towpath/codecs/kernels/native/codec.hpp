// What a back end is given and what it offers: no more crosses between the files compiled for different processors.
#pragma once

#include <cstdint>

namespace towpath {

enum class Code { int8, int4, e4m3, e5m2, bf16 };
enum class Dtype { float32, bfloat16, float16 };

struct Codec {
    Code code;
    int64_t block;  // elements that share a scale; 0: all of a message's
    bool hadamard, stochastic;
};

// Elements of a dtype, or a message, in memory that the caller keeps.
struct Input {
    const uint8_t *at;
    Dtype dtype;
};
struct Output {
    uint8_t *at;
    Dtype dtype;
};
struct Rows {
    const uint8_t *const *at;
    int64_t count;
};

struct Kernels {
    const char *name;
    void (*encode)(const Codec &, Input, int64_t elements, uint8_t *out, uint32_t seed);
    void (*decode_sum)(const Codec &, Rows, int64_t elements, Output);
    void (*decode_sum_encode)(const Codec &, Rows, int64_t elements, uint8_t *out, uint32_t seed);
};

// Which of them there are, CMakeLists.txt decides.
extern const Kernels baseline, x86_64_v3, x86_64_v4;

}  // namespace towpath
