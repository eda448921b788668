// The exact codecs' kernels at one processor level. codecs/exact describes the messages.
#pragma once

#include "codec.hpp"

namespace towpath::exact {

struct Kernels {
    const char *name;
    // The digest of `bytes` bytes, whose first word of 8 bytes has the number `first`.
    uint64_t (*digest)(const uint8_t *from, int64_t bytes, int64_t first);
    // Encode elements into the table and the payloads in `out`, which has room for all elements. Return their bytes.
    // Without `old` the message holds values, and else differences to `old`.
    int64_t (*encode)(Dtype, const uint8_t *old, const uint8_t *values, int64_t elements, uint8_t *out);
    // Decode a table and payloads of `bytes` bytes into `values`. Differences are added to what it holds. Return
    // whether the content is one that an encoder writes; whatever it is, no other memory is read or written.
    bool (*decode)(Dtype, bool difference, const uint8_t *from, int64_t bytes, uint8_t *values, int64_t elements);
};

extern const Kernels baseline, x86_64_v3, x86_64_v4;

}  // namespace towpath::exact
