// What PyTorch needs to know of a device before it runs anything there: its memory, its streams, and that it exists.
//
// A build of PyTorch without CUDA knows the device type, its dispatch keys and its autograd, but has no memory and no
// operators for it. This library adds memory, which is the host's, and a device guard. `device.py` adds operators.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <new>

namespace {

const c10::Device kDevice(c10::kCUDA, 0);
thread_local c10::StreamId current_stream = 0;
std::atomic<c10::StreamId> streams_made = 0;

// Streams have numbers and no order: an operation runs when it is called. Autograd makes the stream of a forward
// operation current in its backward, as on a GPU.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const override { return stream(current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(++streams_made); }
  c10::Stream exchangeStream(c10::Stream next) const override {
    const auto before = current_stream;
    current_stream = next.id();
    return stream(before);
  }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}

 private:
  static c10::Stream stream(c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, kDevice, id); }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard);

void release(void* memory) { c10::GetDefaultCPUAllocator()->raw_deallocate(memory); }

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = bytes ? c10::GetDefaultCPUAllocator()->raw_allocate(bytes) : nullptr;
    return {memory, memory, &release, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

DeviceMemory device_memory;
c10::AllocatorRegisterer<c10::kCUDA> registered(&device_memory);

std::mutex pinned_lock;
std::map<const char*, size_t> pinned;  // by address: the bytes of page-locked memory

void unpin(void* memory) {
  {
    const std::lock_guard lock(pinned_lock);
    pinned.erase(static_cast<const char*>(memory));
  }
  release(memory);
}

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = c10::GetDefaultCPUAllocator()->raw_allocate(bytes ? bytes : 1);
    const std::lock_guard lock(pinned_lock);
    pinned[static_cast<const char*>(memory)] = bytes;
    return {memory, memory, &unpin, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

PinnedMemory pinned_memory;

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::Device getDeviceFromPtr(void*) const override { return kDevice; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  bool isPinnedPtr(const void* address) const override {
    const std::lock_guard lock(pinned_lock);
    const auto* wanted = static_cast<const char*>(address);
    auto after = pinned.upper_bound(wanted);
    return after != pinned.begin() && wanted < (--after)->first + after->second;
  }
};

at::Tensor empty(
    c10::IntArrayRef size,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>,
    std::optional<c10::Device>,
    std::optional<bool>,
    std::optional<c10::MemoryFormat> format) {
  const c10::DispatchKeySet keys(c10::DispatchKey::CUDA);
  return at::detail::empty_generic(size, &device_memory, keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size,
    c10::IntArrayRef stride,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>,
    std::optional<c10::Device>,
    std::optional<bool>) {
  const c10::DispatchKeySet keys(c10::DispatchKey::CUDA);
  return at::detail::empty_strided_generic(size, stride, &device_memory, keys, c10::dtype_or_default(dtype));
}

// A tensor on the other device with the memory of `tensor`, which it keeps alive.
at::Tensor moved(const at::Tensor& tensor, bool to_device) {
  const auto& storage = tensor.storage();
  auto* owner = new c10::Storage(storage);
  c10::DataPtr memory(
      storage.mutable_data(),
      owner,
      [](void* held) { delete static_cast<c10::Storage*>(held); },
      to_device ? kDevice : c10::Device(c10::kCPU));
  c10::Allocator* allocator = to_device ? &device_memory : c10::GetDefaultCPUAllocator();
  c10::Storage alias(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(memory), allocator, true);
  const c10::DispatchKeySet keys(to_device ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU);
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(alias), keys, tensor.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return made;
}

// DistributedDataParallel asks for one.
struct Timer final : c10d::Timer {
  explicit Timer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};

} // namespace

namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, ::Timer);
}

TORCH_LIBRARY(fake_cuda, library) {
  library.def("moved(Tensor tensor, bool to_device) -> Tensor");
  library.impl("moved", c10::DispatchKey::CPU, moved);
  library.impl("moved", c10::DispatchKey::CUDA, moved);
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
}

extern "C" {

// PyTorch makes its hooks once, often before this library is loaded, so they are replaced where they are.
void fake_cuda_start() {
  static_assert(sizeof(Hooks) == sizeof(at::CUDAHooksInterface));
  new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) Hooks();
}

// The build's own function ends in an error for this type of device.
void fake_cuda_resize(int64_t address, int64_t bytes) {
  auto* storage = reinterpret_cast<c10::StorageImpl*>(address);
  auto memory = device_memory.allocate(bytes);
  const auto kept = std::min<size_t>(bytes, storage->nbytes());
  if (kept) {
    std::memcpy(memory.mutable_get(), storage->data(), kept);
  }
  storage->set_data_ptr_noswap(std::move(memory));
  storage->set_nbytes(bytes);
}

int64_t fake_cuda_stream() { return current_stream; }

void fake_cuda_use_stream(int64_t id) { current_stream = id; }
}
