// The devices of torch_sim in C++, as a real package has them: memory of the host, a current device
// for each thread, and kernels of the CPU.
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>

namespace {
using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;

constexpr auto SIM = DeviceType::PrivateUse1;
thread_local DeviceIndex current = 0;

DeviceIndex count() {
    const char *text = std::getenv("SIM_DEVICES");
    return text ? static_cast<DeviceIndex>(std::atoi(text)) : 2;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
    DeviceType type() const override { return SIM; }
    Device exchangeDevice(Device device) const override {
        auto before = getDevice();
        setDevice(device);
        return before;
    }
    Device getDevice() const override { return {SIM, current}; }
    void setDevice(Device device) const override {
        TORCH_CHECK(device.index() >= 0 && device.index() < count(), "sim: no device ", device.index());
        current = device.index();
    }
    void uncheckedSetDevice(Device device) const noexcept override { current = device.index(); }
    c10::Stream getStream(Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
    c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
    DeviceIndex deviceCount() const noexcept override { return count(); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return count() > 0; }
    DeviceIndex deviceCount() const override { return count(); }
    DeviceIndex getCurrentDevice() const override { return current; }
    void setCurrentDevice(DeviceIndex device) const override { Guard().setDevice({SIM, device}); }
    bool hasPrimaryContext(DeviceIndex) const override { return true; }
    void init() const override {}
};

struct Allocator final : at::Allocator {
    at::DataPtr allocate(size_t bytes) override {
        void *data = std::malloc(bytes ? bytes : 1);
        return {data, data, &std::free, Device(SIM, current)};
    }
    at::DeleterFnPtr raw_deleter() const override { return &std::free; }
    void copy_data(void *to, const void *from, size_t bytes) const override {
        std::memcpy(to, from, bytes);
    }
} allocator;

at::ScalarType type_of(std::optional<at::ScalarType> type) {
    return type.value_or(at::ScalarType::Float);
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> type,
                 std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
    c10::DeviceGuard guard(device.value_or(Device(SIM, current)));
    return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                     type_of(type), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                         std::optional<at::ScalarType> type, std::optional<at::Layout>,
                         std::optional<Device> device, std::optional<bool>) {
    c10::DeviceGuard guard(device.value_or(Device(SIM, current)));
    return at::detail::empty_strided_generic(
        size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), type_of(type));
}

at::Tensor on_host(const at::Tensor &tensor) {
    if (tensor.is_cpu())
        return tensor;
    return at::from_blob(tensor.mutable_data_ptr(), tensor.sizes(), tensor.strides(),
                         tensor.options().device(at::kCPU));
}

at::Tensor copy_from(const at::Tensor &from, const at::Tensor &to, bool) {
    on_host(to).copy_(on_host(from));
    return to;
}

at::Tensor copy_from_and_resize(const at::Tensor &from, const at::Tensor &to) {
    at::native::resize_(to, from.sizes(), std::nullopt);
    return copy_from(from, to, false);
}

void on_cpu(const c10::OperatorHandle &op, torch::jit::Stack *stack) {
    at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
    m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    m.impl("empty.memory_format", empty);
    m.impl("empty_strided", empty_strided);
    m.impl("_copy_from", copy_from);
    m.impl("_copy_from_and_resize", copy_from_and_resize);
    m.impl("as_strided", at::native::as_strided_tensorimpl);
    m.impl("resize_", at::native::resize_);
    m.impl("view", at::native::view);
}

const bool registered = [] {
    c10::SetAllocator(SIM, &allocator);
    at::RegisterPrivateUse1HooksInterface(new Hooks);
    return true;
}();
}  // namespace
