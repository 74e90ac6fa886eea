// The part of DLPack's C interface that bytes in one dimension need, and what happens when they are given back.
#include "bindings/dlpack.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "python/gil.h"
#include "wire/message.h"

namespace py = pybind11;

namespace pipecomm {
namespace {

// As DLTensor and DLManagedTensor of dlpack.h, which never change for capsules of this name.
constexpr const char* kDlpackName = "dltensor";
enum class DlpackDevice : std::int32_t { cpu = 1, cuda = 2 };
constexpr std::uint8_t kUnsigned = 1;

struct DlpackTensor {
  void* data;
  DlpackDevice device;
  std::int32_t device_index;
  std::int32_t num_dims;
  std::uint8_t type_code;
  std::uint8_t type_bits;
  std::uint16_t type_lanes;
  std::int64_t* shape;
  std::int64_t* strides;  // none: contiguous
  std::uint64_t byte_offset;
};
static_assert(sizeof(DlpackTensor) == 48 && offsetof(DlpackTensor, shape) == 24);

struct DlpackManaged {
  DlpackTensor tensor;
  void* owner;
  void (*deleter)(DlpackManaged*);
};

struct SharedBlock {
  DlpackManaged managed;
  std::int64_t nbytes;
  Block block;
  std::shared_ptr<Device> device;
  void* stream;
};

using SharedBlockPtr = std::unique_ptr<SharedBlock>;

// Those of which nobody can tell yet when a stream has done with them.
struct Kept {
  std::mutex mutex;
  std::vector<SharedBlockPtr> blocks;
};

// Never destroyed: tensors may outlive this module.
Kept& kept() {
  static auto* made = new Kept;
  return *made;
}

void give_back_now(SharedBlockPtr shared) {
  try {
    shared->block.reset(shared->device ? shared->device->record(shared->stream) : Event{});
  } catch (const std::exception&) {  // under graph capture, or without the device
    const std::lock_guard lock(kept().mutex);
    kept().blocks.push_back(std::move(shared));
  }
}

// Any thread, with or without the interpreter lock, which is given up while CUDA is called.
void give_back(DlpackManaged* managed) {
  SharedBlockPtr shared(static_cast<SharedBlock*>(managed->owner));
  if (!shared->device) return give_back_now(std::move(shared));
  without_gil([&] { give_back_now(std::move(shared)); });
}

void drop_capsule(PyObject* capsule) {
  if (!PyCapsule_IsValid(capsule, kDlpackName)) return;  // somebody has taken it over
  auto* managed = static_cast<DlpackManaged*>(PyCapsule_GetPointer(capsule, kDlpackName));
  managed->deleter(managed);
}

}  // namespace

void give_back_kept() {
  std::vector<SharedBlockPtr> blocks;
  {
    const std::lock_guard lock(kept().mutex);
    blocks.swap(kept().blocks);
  }
  for (SharedBlockPtr& shared : blocks) give_back_now(std::move(shared));
}

py::object to_dlpack(Block block, int device_index, std::shared_ptr<Device> device, void* stream) {
  auto shared = std::make_unique<SharedBlock>();
  shared->nbytes = static_cast<std::int64_t>(block.nbytes());
  shared->managed.tensor = {.data = block.data(),
                            .device = device_index == kOnHost ? DlpackDevice::cpu : DlpackDevice::cuda,
                            .device_index = device_index == kOnHost ? 0 : device_index,
                            .num_dims = 1,
                            .type_code = kUnsigned,
                            .type_bits = 8,
                            .type_lanes = 1,
                            .shape = &shared->nbytes,
                            .strides = nullptr,
                            .byte_offset = 0};
  shared->managed.owner = shared.get();
  shared->managed.deleter = &give_back;
  shared->block = std::move(block);
  shared->device = std::move(device);
  shared->stream = stream;
  PyObject* capsule = PyCapsule_New(&shared->managed, kDlpackName, &drop_capsule);
  if (capsule == nullptr) throw py::error_already_set();
  static_cast<void>(shared.release());
  return py::reinterpret_steal<py::object>(capsule);
}

}  // namespace pipecomm
