// The Python module: a codec and the best kernels that this processor runs. Memory comes as addresses and sizes, which
// the caller vouches for: the module depends on no version of torch.

#include "codec.hpp"
#include "exact.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace nb = nanobind;
using namespace towpath;

namespace {

struct Level {
    const Kernels *codecs;
    const exact::Kernels *exact;
};

// Best first.
std::vector<Level> runnable() {
    std::vector<Level> levels;
#ifdef TOWPATH_X86_LEVELS
    __builtin_cpu_init();
    bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
    bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
              __builtin_cpu_supports("avx512vl");
    if (v4) levels.push_back({&x86_64_v4, &exact::x86_64_v4});
    if (v3) levels.push_back({&x86_64_v3, &exact::x86_64_v3});
#endif
    levels.push_back({&baseline, &exact::baseline});
    return levels;
}

Level level_of(const std::string &name) {
    for (Level each : runnable())
        if (name == each.codecs->name) return each;
    throw std::invalid_argument("not a level that this processor runs: " + name);
}

template <class T>
T named(const std::string &name, std::initializer_list<std::pair<const char *, T>> known) {
    for (auto &[each, value] : known)
        if (name == each) return value;
    throw std::invalid_argument("unknown name: " + name);
}

Dtype dtype_of(const std::string &name) {
    return named<Dtype>(name, {{"float32", Dtype::float32},
                               {"bfloat16", Dtype::bfloat16},
                               {"float16", Dtype::float16}});
}

using Addresses = std::vector<uintptr_t>;

class Coder {
  public:
    Coder(const std::string &name, int64_t block, bool hadamard, bool stochastic, const std::string &level) {
        Code code = named<Code>(name, {{"int8", Code::int8},
                                       {"int4", Code::int4},
                                       {"e4m3", Code::e4m3},
                                       {"e5m2", Code::e5m2},
                                       {"bf16", Code::bf16}});
        codec = {code, code == Code::bf16 ? 0 : block, hadamard, stochastic};
        kernels = level_of(level).codecs;
    }

    void encode(uintptr_t x, const std::string &dtype, int64_t elements, uintptr_t out, uint32_t seed) const {
        Input input{reinterpret_cast<const uint8_t *>(x), dtype_of(dtype)};
        nb::gil_scoped_release others_run;
        kernels->encode(codec, input, elements, reinterpret_cast<uint8_t *>(out), seed);
    }

    void decode_sum(const Addresses &rows, int64_t elements, uintptr_t out, const std::string &dtype) const {
        Output output{reinterpret_cast<uint8_t *>(out), dtype_of(dtype)};
        nb::gil_scoped_release others_run;
        kernels->decode_sum(codec, as_rows(rows), elements, output);
    }

    void decode_sum_encode(const Addresses &rows, int64_t elements, uintptr_t out, uint32_t seed) const {
        nb::gil_scoped_release others_run;
        kernels->decode_sum_encode(codec, as_rows(rows), elements, reinterpret_cast<uint8_t *>(out), seed);
    }

  private:
    Codec codec;
    const Kernels *kernels = nullptr;

    static Rows as_rows(const Addresses &rows) {
        if (rows.empty()) throw std::invalid_argument("no rows to sum");
        return {reinterpret_cast<const uint8_t *const *>(rows.data()), static_cast<int64_t>(rows.size())};
    }
};

class ExactCoder {
  public:
    ExactCoder(const std::string &dtype, const std::string &level)
        : dtype(dtype_of(dtype)), kernels(level_of(level).exact) {}

    uint64_t digest(uintptr_t from, int64_t bytes, int64_t first) const {
        nb::gil_scoped_release others_run;
        return kernels->digest(reinterpret_cast<const uint8_t *>(from), bytes, first);
    }

    int64_t encode(uintptr_t old, uintptr_t values, int64_t elements, uintptr_t out) const {
        nb::gil_scoped_release others_run;
        return kernels->encode(dtype, reinterpret_cast<const uint8_t *>(old),
                               reinterpret_cast<const uint8_t *>(values), elements, reinterpret_cast<uint8_t *>(out));
    }

    bool decode(bool difference, uintptr_t from, int64_t bytes, uintptr_t values, int64_t elements) const {
        nb::gil_scoped_release others_run;
        return kernels->decode(dtype, difference, reinterpret_cast<const uint8_t *>(from), bytes,
                               reinterpret_cast<uint8_t *>(values), elements);
    }

  private:
    Dtype dtype;
    const exact::Kernels *kernels;
};

}  // namespace

NB_MODULE(_native, module) {
    // PyTorch keeps some classes of Python until the process ends, and with them all that their modules refer to. That
    // is no leak, and the report of nanobind would worry users.
    nb::set_leak_warnings(false);
    nb::class_<Coder>(module, "Coder")
        .def(nb::init<const std::string &, int64_t, bool, bool, const std::string &>(), nb::arg("name"),
             nb::arg("block"), nb::arg("hadamard"), nb::arg("stochastic"), nb::arg("level"))
        .def("encode", &Coder::encode, nb::arg("x"), nb::arg("dtype"), nb::arg("elements"), nb::arg("out"),
             nb::arg("seed"))
        .def("decode_sum", &Coder::decode_sum, nb::arg("rows"), nb::arg("elements"), nb::arg("out"), nb::arg("dtype"))
        .def("decode_sum_encode", &Coder::decode_sum_encode, nb::arg("rows"), nb::arg("elements"), nb::arg("out"),
             nb::arg("seed"));
    nb::class_<ExactCoder>(module, "ExactCoder")
        .def(nb::init<const std::string &, const std::string &>(), nb::arg("dtype"), nb::arg("level"))
        .def("digest", &ExactCoder::digest, nb::arg("start"), nb::arg("nbytes"), nb::arg("first"))
        .def("encode", &ExactCoder::encode, nb::arg("old"), nb::arg("values"), nb::arg("elements"), nb::arg("out"))
        .def("decode", &ExactCoder::decode, nb::arg("difference"), nb::arg("start"), nb::arg("nbytes"),
             nb::arg("values"), nb::arg("elements"));
    module.def("levels", [] {
        std::vector<std::string> names;
        for (Level each : runnable()) names.push_back(each.codecs->name);
        return names;
    });
}
