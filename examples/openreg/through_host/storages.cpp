// Resizing of a PrivateUse1 storage, with the allocator that the device has registered.

#include <c10/core/DeviceGuard.h>
#include <torch/extension.h>

#include <algorithm>

static void resize(const at::Tensor& tensor, int64_t size) {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  TORCH_CHECK(size >= 0 && storage->resizable(), "this storage cannot have ", size, " bytes");
  const auto bytes = static_cast<size_t>(size);
  if (bytes == storage->nbytes()) {
    return;
  }
  const c10::DeviceGuard guard(storage->device());
  auto* allocator = c10::GetAllocator(c10::DeviceType::PrivateUse1);
  auto data = allocator->allocate(bytes);
  if (const auto kept = std::min(bytes, storage->nbytes())) {
    allocator->copy_data(data.get(), storage->data(), kept);
  }
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(bytes);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("resize", &resize);
}
