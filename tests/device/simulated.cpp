// An accelerator that computes on the CPU, for tests of the code for GPUs: PyTorch's backend PrivateUse1, named "sim".
//
// Kernels are those of the CPU and run when they are launched. What differs from a CPU is what a GPU does:
//
// - The host cannot read the memory of a device: its addresses are not mapped for it (a read ends the process), and an
//   operator refuses tensors of several devices.
// - Streams are ordered only by events and waits. Each access to memory is compared with earlier ones of other streams
//   by vector clocks, as by a race detector; an access that nothing orders after them raises an error.
// - A copy to the host with `non_blocking=True` arrives when the host waits for it. Until then its target is poisoned.
//   The page-locked source of a copy to the device must not change until the host has waited for the copy.
// - Freed memory is poisoned and used again at once by the stream that allocated it. If another stream may still use it
//   then, that is an error, unless that stream was recorded (`Tensor.record_stream`).
// - Generators draw other numbers than those of the CPU from the same seed.
// - Errors of a device are raised at the next synchronization, and by each call after it.
//
// It counts what costs time on a GPU, see `count`.

#define NDEBUG  // as in the libraries of torch, on which the layout of some classes depends

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/record_function.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>
#include <unistd.h>

#include <chrono>
#include <map>
#include <mutex>
#include <set>

namespace {

using namespace at;

constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr int kMaxStreams = 64;
constexpr char kPoison = static_cast<char>(0xff);  // NaN as floating-point numbers, -1 as integers
constexpr size_t kAlignment = 512;

// ------------------------------------------------------------------------------------------------------ order of work

// The newest operation of each stream that a stream, an event or the host comes after; streams by `stream_key`.
using Clocks = std::map<int, uint64_t>;

void join(Clocks& into, const Clocks& other) {
  for (auto& [stream, clock] : other) into[stream] = std::max(into[stream], clock);
}

bool covers(const Clocks& clocks, int stream, uint64_t clock) {
  auto found = clocks.find(stream);
  return found != clocks.end() && found->second >= clock;
}

int stream_key(const Stream& stream) { return stream.device_index() * kMaxStreams + static_cast<int>(stream.id()); }

std::string stream_name(int key) {
  return c10::str("stream ", key % kMaxStreams, " of sim:", key / kMaxStreams);
}

struct Access {
  const char *low, *high;
  int stream;
  uint64_t clock;
  bool writes;
  std::string by;
};

struct Block {
  char* address;
  size_t size, used;
  int stream;  // that of the allocation
  bool is_allocated;
  std::set<int> recorded;
  std::vector<Access> accesses;
};

struct Arena {
  char *device = nullptr, *host = nullptr;  // two views of the same memory; the host must not use the first
  size_t end = 0;
};

// A copy between host and device for which the host has not waited.
struct Transfer {
  int stream;
  uint64_t clock;
  Storage host;
  char* address;
  std::vector<char> bytes;
  bool to_host;
};

struct Event {
  Clocks clocks;
  std::chrono::steady_clock::time_point time;
};

struct Simulator {
  std::recursive_mutex mutex;
  int num_devices = 2;
  size_t capacity = size_t{4} << 30;
  size_t limit = capacity;  // bytes of each device that may be in use
  std::vector<Arena> arenas;
  std::vector<int> next_stream;
  std::vector<c10::CachingDeviceAllocator::DeviceStats> stats;
  std::map<const char*, Block> blocks;
  std::map<std::pair<int, size_t>, std::vector<char*>> free_blocks;  // by stream and size, the newest last
  std::map<std::pair<int, size_t>, std::vector<char*>> returned;     // by device and size: not the allocator's any more
  std::map<int, int64_t> outside;                                    // memory that others than the allocator use, by device
  std::map<int, Clocks> streams;
  std::map<int, std::vector<Access>> freed;  // uses of freed memory by streams other than its own, by its stream
  Clocks host;
  std::vector<Transfer> transfers;
  std::map<int, std::string> errors;  // by device
  std::set<int> broken;               // devices that have raised their error
  std::vector<std::string> races;
  std::map<std::string, int64_t> counts;
  bool is_counting = false;
  int64_t allocations_until_failure = -1, num_synchronizations = 0;
};

Simulator& simulator() {
  static auto* instance = new Simulator();  // never destroyed, as other static objects may free tensors later
  return *instance;
}

using Lock = std::lock_guard<std::recursive_mutex>;

[[noreturn]] void raise_race(const std::string& message) {
  simulator().races.push_back(message);
  TORCH_CHECK(false, "simulated device: ", message);
}

thread_local DeviceIndex current_device = 0;
thread_local std::map<DeviceIndex, int64_t> current_streams;
thread_local bool is_counted = true;  // whether what this thread does belongs to the step

// Counts what a step costs: "launches" of kernels, "waits" of the host for work that it does not know to be done, "pageable"
// and "locked" copies between host and device, and "gloo bytes", all tensors of the host in messages and collectives.
void count(const char* name, int64_t number = 1) {
  auto& s = simulator();
  Lock lock(s.mutex);
  if (s.is_counting && is_counted) s.counts[name] += number;
}

Stream current_stream(DeviceIndex device) { return Stream(Stream::UNSAFE, Device(kSim, device), current_streams[device]); }

// Begins an operation on a stream, which comes after all that the host has waited for.
uint64_t begin_operation(int stream) {
  auto& s = simulator();
  auto& clocks = s.streams[stream];
  join(clocks, s.host);
  return ++clocks[stream];
}

Block& block_of(const void* address) {
  auto& blocks = simulator().blocks;
  auto found = blocks.upper_bound(static_cast<const char*>(address));
  TORCH_INTERNAL_ASSERT(found != blocks.begin());
  return std::prev(found)->second;
}

// Checks that nothing but ordered operations use a tensor's memory, and records the access.
void access(const Tensor& tensor, int stream, uint64_t clock, bool writes, const std::string& by) {
  if (!tensor.defined() || tensor.device().type() != kSim || !tensor.numel()) return;
  auto& s = simulator();
  auto* low = static_cast<const char*>(tensor.const_data_ptr());
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  auto* high = low + (last + 1) * static_cast<int64_t>(tensor.element_size());
  auto& block = block_of(low);
  auto& clocks = s.streams[stream];
  for (auto& other : block.accesses)
    if (other.low < high && low < other.high && (writes || other.writes) && !covers(clocks, other.stream, other.clock))
      raise_race(c10::str(by, " on ", stream_name(stream), writes ? " writes" : " reads", " memory that ", other.by, " on ",
                          stream_name(other.stream), other.writes ? " writes" : " reads", ", and nothing orders them"));
  auto is_superseded = [&](const Access& other) {
    bool is_inside = low <= other.low && other.high <= high;
    return is_inside && (writes || (!other.writes && other.stream == stream)) && covers(clocks, other.stream, other.clock);
  };
  std::erase_if(block.accesses, is_superseded);
  block.accesses.push_back({low, high, stream, clock, writes, by});
}

// Lets the host wait for what `clocks` say: copies arrive, and errors of the device are raised.
void wait_on_host(const Clocks& clocks, DeviceIndex device) {
  auto& s = simulator();
  std::vector<Transfer> done;  // freed without the lock, because to free memory of Python takes its global lock
  std::string error;
  {
    Lock lock(s.mutex);
    ++s.num_synchronizations;
    for (auto& [stream, clock] : clocks)
      if (!covers(s.host, stream, clock)) {
        count("waits");
        break;
      }
    join(s.host, clocks);
    auto is_pending = [&](const Transfer& t) { return !covers(s.host, t.stream, t.clock); };
    auto first_done = std::stable_partition(s.transfers.begin(), s.transfers.end(), is_pending);
    std::move(first_done, s.transfers.end(), std::back_inserter(done));
    s.transfers.erase(first_done, s.transfers.end());
    for (auto& transfer : done) {
      if (transfer.to_host)
        memcpy(transfer.address, transfer.bytes.data(), transfer.bytes.size());
      else if (memcmp(transfer.address, transfer.bytes.data(), transfer.bytes.size()) != 0)
        error = "the host has changed page-locked memory from which a device was still copying";
    }
    if (!error.empty()) s.races.push_back(error);
    if (auto found = s.errors.find(device); found != s.errors.end()) {
      s.broken.insert(device);
      throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, 700, "CUDA error (simulated): " + found->second);
    }
  }
  TORCH_CHECK(error.empty(), "simulated device: ", error);
}

void check_not_broken(DeviceIndex device) {
  auto& s = simulator();
  if (s.broken.count(device))
    throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, 700, "CUDA error (simulated): " + s.errors[device]);
}

void synchronize_stream(const Stream& stream) {
  Clocks clocks;
  {
    Lock lock(simulator().mutex);
    clocks = simulator().streams[stream_key(stream)];
  }
  wait_on_host(clocks, stream.device_index());
}

// ------------------------------------------------------------------------------------------------------------- memory

char* host_address(const void* address) {
  for (auto& arena : simulator().arenas)
    if (auto offset = static_cast<const char*>(address) - arena.device;
        0 <= offset && offset < static_cast<int64_t>(simulator().capacity))
      return arena.host + offset;
  TORCH_INTERNAL_ASSERT(false, "not an address of a simulated device");
}

void free_block(void* address) {
  auto& s = simulator();
  Lock lock(s.mutex);
  auto& block = block_of(address);
  int device = block.stream / kMaxStreams;
  auto& clocks = s.streams[block.stream];
  join(clocks, s.host);
  for (auto& used : block.accesses)
    if (used.stream != block.stream && !block.recorded.count(used.stream) && !covers(clocks, used.stream, used.clock))
      s.freed[block.stream].push_back(used);
  // The allocator waits until the recorded streams are done with the block before it uses it again.
  block.accesses.clear();
  block.recorded.clear();
  block.is_allocated = false;
  memset(host_address(address), kPoison, block.size);
  s.stats[device].allocated_bytes[0].decrease(block.used);
  s.free_blocks[{block.stream, block.size}].push_back(block.address);
}

// Checks that a stream which allocates memory comes after all uses of the memory that it may get. Any freed block counts,
// since an allocator may split and merge blocks.
void check_freed_memory(int stream) {
  auto& s = simulator();
  auto& clocks = s.streams[stream];
  join(clocks, s.host);
  auto freed = std::move(s.freed[stream]);
  s.freed[stream].clear();
  for (auto& used : freed)
    if (!covers(clocks, used.stream, used.clock))
      raise_race(c10::str("memory of ", stream_name(stream), " was freed and may be used again, and ", used.by, " on ",
                          stream_name(used.stream), " may still use it; record_stream was not called"));
}

int64_t free_memory(int device) {
  auto& s = simulator();
  return static_cast<int64_t>(s.limit) - s.stats[device].reserved_bytes[0].current - s.outside[device];
}

struct DeviceMemory final : c10::DeviceAllocator {
  DataPtr allocate(size_t bytes) override {
    auto& s = simulator();
    Lock lock(s.mutex);
    Device device(kSim, current_device);
    check_not_broken(current_device);
    if (!bytes) return {nullptr, nullptr, &free_block, device};
    int stream = stream_key(current_stream(current_device));
    check_freed_memory(stream);
    size_t size = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    auto& arena = s.arenas[current_device];
    auto& reusable = s.free_blocks[{stream, size}];
    bool is_refused = s.allocations_until_failure >= 0 && s.allocations_until_failure-- == 0;
    if (reusable.empty() && static_cast<int64_t>(size) > free_memory(current_device)) emptyCache({0, 0});
    auto& returned = s.returned[{current_device, size}];
    bool is_full = static_cast<int64_t>(size) > free_memory(current_device) || (returned.empty() && arena.end + size > s.capacity);
    if (is_refused || (reusable.empty() && is_full)) {
      ++s.stats[current_device].num_ooms;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory (simulated). Tried to allocate ", bytes, " bytes.");
    }
    char* address;
    if (!reusable.empty()) {
      address = reusable.back();
      reusable.pop_back();
    } else {
      if (returned.empty()) {
        address = arena.device + arena.end;
        arena.end += size;
      } else {
        address = returned.back();
        returned.pop_back();
      }
      s.stats[current_device].reserved_bytes[0].increase(size);
      memset(host_address(address), kPoison, size);
    }
    s.blocks[address] = {address, size, bytes, stream, true, {}, {}};
    s.stats[current_device].allocated_bytes[0].increase(bytes);
    return {address, address, &free_block, device};
  }
  DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    memcpy(host_address(to), host_address(from), bytes);
  }
  bool initialized() override { return true; }
  void emptyCache(MempoolId_t) override {
    auto& s = simulator();
    Lock lock(s.mutex);
    for (auto& [key, addresses] : s.free_blocks) {
      int device = key.first / kMaxStreams;
      s.stats[device].reserved_bytes[0].decrease(key.second * addresses.size());
      auto& returned = s.returned[{device, key.second}];
      returned.insert(returned.end(), addresses.begin(), addresses.end());
      addresses.clear();
    }
  }
  void recordStream(const DataPtr& data, Stream stream) override {
    Lock lock(simulator().mutex);
    if (data.get() != nullptr) block_of(data.get()).recorded.insert(stream_key(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override { return simulator().stats[device]; }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex device) override { simulator().stats[device].allocated_bytes[0].reset_peak(); }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    Lock lock(simulator().mutex);
    return {static_cast<size_t>(std::max<int64_t>(0, free_memory(device))), simulator().limit};
  }
};
DeviceMemory device_memory;

// Page-locked memory: a freed block is used again at once, unless a copy that the host has not waited for uses it.
struct PinnedMemory final : Allocator {
  static inline std::mutex mutex;
  static inline std::map<const char*, size_t> sizes;
  static inline std::vector<char*> free_addresses;
  static inline std::map<const char*, size_t> locked;  // other memory of the host, which is not allocated here

  DataPtr allocate(size_t bytes) override {
    std::lock_guard<std::mutex> lock(mutex);
    size_t size = std::max<size_t>(64, bytes);
    for (auto it = free_addresses.rbegin(); it != free_addresses.rend(); ++it)
      if (sizes[*it] == size && !is_used(*it, size)) {
        char* address = *it;
        free_addresses.erase(std::next(it).base());
        return {address, address, &release, Device(kCPU)};
      }
    auto* address = static_cast<char*>(std::aligned_alloc(64, (size + 63) / 64 * 64));
    sizes[address] = size;
    return {address, address, &release, Device(kCPU)};
  }
  static bool is_used(const char* address, size_t size) {
    auto& s = simulator();
    Lock lock(s.mutex);
    return std::any_of(s.transfers.begin(), s.transfers.end(),
                       [&](const Transfer& t) { return address <= t.address && t.address < address + size; });
  }
  static bool contains(const void* data) {
    std::lock_guard<std::mutex> lock(mutex);
    auto is_in = [&](const std::map<const char*, size_t>& blocks) {
      auto found = blocks.upper_bound(static_cast<const char*>(data));
      return found != blocks.begin() && static_cast<const char*>(data) < std::prev(found)->first + std::prev(found)->second;
    };
    return is_in(sizes) || is_in(locked);
  }
  static void release(void* address) {
    std::lock_guard<std::mutex> lock(mutex);
    auto* block = static_cast<char*>(address);
    if (!is_used(block, sizes[block])) memset(block, kPoison, sizes[block]);
    free_addresses.push_back(block);
  }
  DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
};
PinnedMemory pinned_memory;

// --------------------------------------------------------------------------------------------------------- generators

struct SimulatedGenerator final : c10::GeneratorImpl {
  explicit SimulatedGenerator(DeviceIndex index)
      : GeneratorImpl(Device(kSim, index), DispatchKeySet(DispatchKey::PrivateUse1)),
        inner(make_generator<CPUGeneratorImpl>()) {
    set_current_seed(default_rng_seed_val);
  }
  void set_current_seed(uint64_t value) override {
    seed_value = value;
    inner.set_current_seed(value * 0x9E3779B97F4A7C15ull + 1);
  }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "no offsets"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "no offsets"); }
  uint64_t current_seed() const override { return seed_value; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_value;
  }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  SimulatedGenerator* clone_impl() const override {
    auto* copy = new SimulatedGenerator(device().index());
    copy->inner = inner.clone();
    copy->seed_value = seed_value;
    return copy;
  }
  Generator inner;
  uint64_t seed_value = 0;
};

const Generator& default_generator(DeviceIndex device) {
  static auto* generators = [] {
    auto* made = new std::vector<Generator>();
    for (int i = 0; i < simulator().num_devices; ++i) made->push_back(make_generator<SimulatedGenerator>(i));
    return made;
  }();
  return (*generators)[device < 0 ? current_device : device];
}

// --------------------------------------------------------------------------------------- devices, streams and events

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return kSim; }
  Device exchangeDevice(Device device) const override {
    auto before = current_device;
    uncheckedSetDevice(device);
    return Device(kSim, before);
  }
  Device getDevice() const override { return Device(kSim, current_device); }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < simulator().num_devices, "invalid device ordinal ", int(device.index()));
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  Stream getStream(Device device) const override { return current_stream(index_of(device)); }
  Stream getDefaultStream(Device device) const override { return Stream(Stream::DEFAULT, Device(kSim, index_of(device))); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream getNewStream(Device device, int) const override {
    auto& s = simulator();
    Lock lock(s.mutex);
    auto index = index_of(device);
    // Stream 0 is the default one. As in PyTorch's pools, 32 streams are handed out in turn.
    return Stream(Stream::UNSAFE, Device(kSim, index), 1 + s.next_stream[index]++ % 32);
  }
  Stream exchangeStream(Stream stream) const override {
    auto before = current_stream(stream.device_index());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    Lock lock(simulator().mutex);
    if (*event == nullptr) *event = new Event();
    auto key = stream_key(stream);
    begin_operation(key);
    *static_cast<Event*>(*event) = {simulator().streams[key], std::chrono::steady_clock::now()};
  }
  void block(void* event, const Stream& stream) const override {
    Lock lock(simulator().mutex);
    if (event != nullptr) join(simulator().streams[stream_key(stream)], static_cast<Event*>(event)->clocks);
  }
  bool queryEvent(void* event) const override {
    if (event != nullptr) synchronizeEvent(event);
    return true;
  }
  DeviceIndex deviceCount() const noexcept override { return static_cast<DeviceIndex>(simulator().num_devices); }
  bool queryStream(const Stream& stream) const override {
    synchronize_stream(stream);
    return true;
  }
  void synchronizeStream(const Stream& stream) const override { synchronize_stream(stream); }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) wait_on_host(static_cast<Event*>(event)->clocks, current_device);
  }
  void synchronizeDevice(const DeviceIndex device) const override {
    Clocks clocks;
    auto index = device < 0 ? current_device : device;
    {
      Lock lock(simulator().mutex);
      for (auto& [stream, seen] : simulator().streams)
        if (stream / kMaxStreams == index) join(clocks, seen);
    }
    wait_on_host(clocks, index);
  }
  void recordDataPtrOnStream(const DataPtr& data, const Stream& stream) const override {
    device_memory.recordStream(data, stream);
  }
  double elapsedTime(void* first, void* second, const DeviceIndex) const override {
    auto time = static_cast<Event*>(second)->time - static_cast<Event*>(first)->time;
    return std::chrono::duration<double, std::milli>(time).count();
  }

 private:
  static DeviceIndex index_of(Device device) { return device.index() < 0 ? current_device : device.index(); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

void resize_storage(const Storage& storage, size_t bytes);

struct Hooks final : PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(simulator().num_devices); }
  void setCurrentDevice(DeviceIndex device) const override { Guard().setDevice(Device(kSim, device)); }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override { return Guard().exchangeDevice(Device(kSim, device)).index(); }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* data) const override { return PinnedMemory::contains(data); }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  const Generator& getDefaultGenerator(DeviceIndex device) const override { return default_generator(device); }
  Generator getNewGenerator(DeviceIndex device) const override {
    return make_generator<SimulatedGenerator>(device < 0 ? current_device : device);
  }
  void resizePrivateUse1Bytes(const Storage& storage, size_t bytes) const override { resize_storage(storage, bytes); }
};
Hooks hooks;

// ---------------------------------------------------------------------------------------------------------- operators

// Returns a tensor of the CPU with the same memory; the address is that of the host's view of it.
Tensor on_host(const Tensor& tensor) {
  if (!tensor.defined() || tensor.device().type() != kSim) return tensor;
  auto& storage = tensor.storage();
  void* base = storage.nbytes() ? host_address(storage.data()) : nullptr;
  auto* owner = new Storage(storage);
  DataPtr data(base, owner, [](void* p) { delete static_cast<Storage*>(p); }, Device(kCPU));
  auto alias = c10::make_intrusive<StorageImpl>(StorageImpl::use_byte_size_t(), storage.nbytes(), std::move(data),
                                                c10::GetAllocator(kCPU), true);
  auto result = at::detail::make_tensor<TensorImpl>(Storage(alias), DispatchKeySet(DispatchKey::CPU), tensor.dtype());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return result;
}

Tensor empty_on_device(IntArrayRef size, std::optional<ScalarType> dtype, std::optional<Layout>, std::optional<Device> device,
                       std::optional<bool>, std::optional<MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &device_memory, DispatchKeySet(DispatchKey::PrivateUse1),
                                   dtype.value_or(typeMetaToScalarType(at::get_default_dtype())), format);
}

Tensor empty_strided_on_device(IntArrayRef size, IntArrayRef stride, std::optional<ScalarType> dtype, std::optional<Layout>,
                               std::optional<Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, &device_memory, DispatchKeySet(DispatchKey::PrivateUse1),
                                           dtype.value_or(typeMetaToScalarType(at::get_default_dtype())));
}

// An operation on the current stream of a device: its accesses are checked when it begins.
struct Operation {
  Operation(DeviceIndex device, std::string operator_name) : name(std::move(operator_name)) {
    Lock lock(simulator().mutex);
    check_not_broken(device);
    stream = stream_key(current_stream(device));
    clock = begin_operation(stream);
  }
  void reads(const Tensor& tensor) { use(tensor, false); }
  void writes(const Tensor& tensor) { use(tensor, true); }
  void use(const Tensor& tensor, bool does_write) {
    Lock lock(simulator().mutex);
    access(tensor, stream, clock, does_write, name);
  }
  std::string name;
  int stream;
  uint64_t clock;
};

void resize_storage(const Storage& storage, size_t bytes) {
  c10::DeviceGuard guard(storage.device());
  auto data = device_memory.allocate(bytes);
  if (auto kept = std::min(bytes, storage.nbytes())) memcpy(host_address(data.get()), host_address(storage.data()), kept);
  storage.set_data_ptr_noswap(std::move(data));
  storage.set_nbytes(bytes);
}

const Tensor& resize_tensor(const Tensor& self, IntArrayRef size, std::optional<MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() != size) impl->set_sizes_contiguous(size);
  if (format.has_value() && *format != MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  size_t bytes = at::detail::computeStorageNbytes(self.sizes(), self.strides(), self.element_size(), self.storage_offset());
  if (bytes > self.storage().nbytes()) resize_storage(self.storage(), bytes);
  return self;
}

Tensor to_new_device_memory(const Tensor& value, DeviceIndex device, Operation& operation) {
  if (!value.defined()) return value;
  auto result = empty_strided_on_device(value.sizes(), value.strides(), value.scalar_type(), {}, Device(kSim, device), {});
  operation.writes(result);
  on_host(result).copy_(value);
  return result;
}

bool is_on_device(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == kSim; }

// The operators whose indices may be in the memory of the host, and those for whose result the host waits, as with CUDA.
const std::set<std::string> kHostIndices{"aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put",
                                         "aten::_unsafe_index", "aten::_unsafe_index_put"};
const std::set<std::string> kWaiting{"aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_consecutive",
                                     "aten::unique_dim", "aten::equal", "aten::repeat_interleave"};

// Runs an operator on the CPU in the memory of the device.
void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto& schema = op.schema();
  auto& arguments = schema.arguments();
  auto begin = stack->size() - arguments.size();
  std::vector<std::pair<Tensor, size_t>> tensors;  // with their arguments
  std::optional<Device> device, other_device;
  auto add = [&](const Tensor& tensor, size_t argument) {
    if (!tensor.defined()) return;
    tensors.emplace_back(tensor, argument);
    if (tensor.device().type() == kSim && !device.has_value()) device = tensor.device();
    bool is_number = tensor.device().type() == kCPU && (tensor.dim() == 0 || kHostIndices.count(schema.name()));
    if (!is_number && (!device.has_value() || tensor.device() != *device)) other_device = tensor.device();
  };
  for (size_t i = 0; i < arguments.size(); ++i) {
    auto& value = (*stack)[begin + i];
    if (value.isTensor()) {
      add(value.toTensor(), i);
    } else if (value.isTensorList()) {
      for (const Tensor& tensor : value.toTensorVector()) add(tensor, i);
    } else if (value.isOptionalTensorList()) {
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector()) add(tensor.value_or(Tensor()), i);
    } else if (value.isDevice() && value.toDevice().type() == kSim && !device.has_value()) {
      device = value.toDevice();
    }
  }
  TORCH_CHECK(!device.has_value() || !other_device.has_value() || *other_device == *device,
              "Expected all tensors to be on the same device, but found at least two devices, ", device->str(), " and ",
              other_device.has_value() ? other_device->str() : "", "! (when checking arguments of ", schema.name(), ")");
  c10::OptionalDeviceGuard guard(device);
  auto index = current_device;
  Operation operation(index, schema.name());
  count("launches");
  std::map<c10::TensorImpl*, Tensor> originals;  // by their alias on the host
  std::vector<std::pair<Tensor, Tensor>> written;
  auto alias_of = [&](const Tensor& tensor, size_t argument) {
    if (!is_on_device(tensor)) return tensor;
    auto alias = on_host(tensor);
    originals[alias.unsafeGetTensorImpl()] = tensor;
    if (auto* info = arguments[argument].alias_info(); info != nullptr && info->isWrite()) written.emplace_back(tensor, alias);
    return alias;
  };
  for (auto& [tensor, argument] : tensors) {
    auto* info = arguments[argument].alias_info();
    operation.use(tensor, info != nullptr && info->isWrite());
  }
  for (size_t i = 0; i < arguments.size(); ++i) {
    auto& value = (*stack)[begin + i];
    if (value.isTensor()) {
      value = alias_of(value.toTensor(), i);
    } else if (value.isTensorList()) {
      std::vector<Tensor> aliases;
      for (const Tensor& tensor : value.toTensorVector()) aliases.push_back(alias_of(tensor, i));
      value = c10::List<Tensor>(aliases);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> aliases;
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector())
        aliases.push_back(tensor.has_value() ? std::optional<Tensor>(alias_of(*tensor, i)) : std::nullopt);
      value = aliases;
    } else if (value.isDevice()) {
      value = Device(kCPU);
    } else if (arguments[i].type()->str().find("Generator") != std::string::npos) {
      auto generator = value.isNone() ? default_generator(index) : value.toGenerator();
      if (generator.device().type() == kSim) value = generator.get<SimulatedGenerator>()->inner;
    }
  }
  op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
  for (auto& [tensor, alias] : written)
    if (tensor.sizes() != alias.sizes() || tensor.strides() != alias.strides()) {
      resize_tensor(tensor, alias.sizes(), {});
      tensor.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides());
      operation.writes(tensor);
      on_host(tensor).copy_(alias);
    }
  auto from_host = [&](const Tensor& result) {
    if (!result.defined() || is_on_device(result)) return result;
    if (auto found = originals.find(result.unsafeGetTensorImpl()); found != originals.end()) return found->second;
    return to_new_device_memory(result, index, operation);
  };
  bool waits = kWaiting.count(schema.name()) != 0;
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = from_host(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<Tensor> results;
      for (const Tensor& tensor : value.toTensorVector()) results.push_back(from_host(tensor));
      value = c10::List<Tensor>(results);
    }
  }
  if (waits) synchronize_stream(current_stream(index));
}

// Copies between host and device, see the head of this file.
Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  auto& s = simulator();
  if (is_on_device(source) && is_on_device(target)) {
    auto from = current_stream(source.device().index()), to = current_stream(target.device().index());
    if (source.device() != target.device()) {
      Lock lock(s.mutex);
      join(s.streams[stream_key(to)], s.streams[stream_key(from)]);
    }
    Operation operation(target.device().index(), "aten::copy_");
    count("launches");
    operation.reads(source);
    operation.writes(target);
    on_host(target).copy_(on_host(source));
    if (source.device() != target.device()) {
      Lock lock(s.mutex);
      join(s.streams[stream_key(from)], s.streams[stream_key(to)]);
    }
    return target;
  }
  auto& tensor = is_on_device(source) ? source : target;
  auto& host = is_on_device(source) ? target : source;
  Operation operation(tensor.device().index(), is_on_device(source) ? "copy to the host" : "copy to the device");
  operation.use(tensor, is_on_device(target));
  count(PinnedMemory::contains(host.const_data_ptr()) ? "locked" : "pageable");
  bool is_plain = source.scalar_type() == target.scalar_type() && host.is_contiguous() && host.nbytes() > 0;
  bool is_late = non_blocking && is_plain && (is_on_device(source) || PinnedMemory::contains(host.const_data_ptr()));
  auto* address = static_cast<char*>(const_cast<void*>(host.const_data_ptr()));
  if (is_late && is_on_device(source)) {
    auto values = on_host(source).contiguous();
    auto* data = static_cast<const char*>(values.const_data_ptr());
    Lock lock(s.mutex);
    s.transfers.push_back({operation.stream, operation.clock, host.storage(), address, {data, data + host.nbytes()}, true});
    memset(address, kPoison, host.nbytes());
    return target;
  }
  on_host(target).copy_(on_host(source));
  if (is_late) {
    Lock lock(s.mutex);
    s.transfers.push_back({operation.stream, operation.clock, host.storage(), address, {address, address + host.nbytes()}, false});
  } else if (!non_blocking) {
    synchronize_stream(current_stream(tensor.device().index()));
  }
  return target;
}

// One launch for tensors of one device, as with CUDA; otherwise one copy for each.
void foreach_copy(TensorList targets, TensorList sources, bool non_blocking) {
  bool is_alike = true;
  for (size_t i = 0; i < targets.size(); ++i) is_alike &= targets[i].device() == sources[i].device();
  if (!is_alike) {
    for (size_t i = 0; i < targets.size(); ++i) targets[i].copy_(sources[i], non_blocking);
    return;
  }
  Operation operation(targets[0].device().index(), "aten::_foreach_copy_");
  count("launches");
  for (size_t i = 0; i < targets.size(); ++i) {
    operation.reads(sources[i]);
    operation.writes(targets[i]);
    on_host(targets[i]).copy_(on_host(sources[i]));
  }
}

Scalar local_scalar(const Tensor& tensor) {
  Operation operation(tensor.device().index(), "aten::_local_scalar_dense");
  count("pageable");
  operation.reads(tensor);
  synchronize_stream(current_stream(tensor.device().index()));
  return on_host(tensor).item();
}

Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, IntArrayRef stride,
                   IntArrayRef padding, IntArrayRef dilation, bool transposed, IntArrayRef output_padding, int64_t groups) {
  Operation operation(input.device().index(), "aten::convolution");
  count("launches");
  for (auto& tensor : {input, weight, bias.value_or(Tensor())}) operation.reads(tensor);
  auto result = at::convolution(on_host(input), on_host(weight), on_host(bias.value_or(Tensor())), stride, padding, dilation,
                                transposed, output_padding, groups);
  return to_new_device_memory(result, input.device().index(), operation);
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& gradient, const Tensor& input, const Tensor& weight,
                                                        IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
                                                        bool transposed, IntArrayRef output_padding, int64_t groups,
                                                        std::array<bool, 3> mask) {
  Operation operation(input.device().index(), "aten::convolution_backward");
  count("launches");
  for (auto& tensor : {gradient, input, weight}) operation.reads(tensor);
  auto bias_size = transposed ? weight.size(1) * groups : weight.size(0);
  auto [a, b, c] = at::convolution_backward(on_host(gradient), on_host(input), on_host(weight), IntArrayRef({bias_size}), stride,
                                            padding, dilation, transposed, output_padding, groups, mask);
  auto index = input.device().index();
  return {to_new_device_memory(a, index, operation), to_new_device_memory(b, index, operation),
          to_new_device_memory(c, index, operation)};
}

// Without this the kernel of the CPU would draw from the CPU's generator.
std::tuple<Tensor, Tensor> dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true)) return {input.clone(), at::ones_like(input, input.options().dtype(kBool))};
  auto mask = at::empty_like(input, input.options().dtype(kBool)).bernoulli_(1 - p);
  return {input.mul(mask).mul_(p < 1 ? 1 / (1 - p) : 0), mask};
}

Tensor& set_storage(Tensor& self, Storage source, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_storage_offset(offset);
  if (stride.data() == nullptr)
    self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  else
    self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  return self;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty_on_device);
  m.impl("empty_strided", empty_strided_on_device);
  m.impl("resize_", resize_tensor);
  m.impl("_copy_from", copy_from);
  m.impl("_foreach_copy_", foreach_copy);
  // Without these the dispatcher would call one operator for each tensor.
  for (auto* name : {"_foreach_norm.Scalar", "_foreach_mul_.Scalar", "_foreach_add_.List", "_foreach_lerp_.Scalar"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  m.impl("native_dropout", dropout);
  m.impl("as_strided", native::as_strided_tensorimpl);
  m.impl("view", native::view);
  m.impl("_reshape_alias", native::_reshape_alias);
  m.impl("unfold", native::unfold);
  m.impl("view_as_real", native::view_as_real);
  m.impl("view_as_complex", native::view_as_complex);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", [](Tensor& self, const Tensor& source) -> Tensor& {
    return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
  });
  m.impl("set_.source_Storage", [](Tensor& self, Storage source) -> Tensor& {
    auto size = static_cast<int64_t>(source.nbytes() / self.element_size());
    return set_storage(self, std::move(source), 0, size, 1);
  });
  m.impl("record_stream", [](Tensor& self, Stream stream) { device_memory.recordStream(self.storage().data_ptr(), stream); });
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>()); }
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

#define LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FULL_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define WIDEST_TYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  using at::autocast::CastPolicy;
  AT_FORALL_LOWER_PRECISION_FP(LOWER_PRECISION)
  AT_FORALL_FP32(FULL_PRECISION)
  AT_FORALL_PROMOTE(WIDEST_TYPE)
}

// Adds up the tensors of the host in messages and collectives, in all threads.
void count_messages() {
  auto begin = [](const RecordFunction& function) -> std::unique_ptr<ObserverContext> {
    if (std::string_view(function.name()).substr(0, 6) != "c10d::") return nullptr;
    auto add = [](const Tensor& tensor) {
      if (tensor.defined() && tensor.device().is_cpu()) count("gloo bytes", static_cast<int64_t>(tensor.nbytes()));
    };
    for (const c10::IValue& value : function.inputs()) {
      if (value.isTensor()) add(value.toTensor());
      if (value.isTensorList())
        for (const Tensor& tensor : value.toTensorVector()) add(tensor);
    }
    return nullptr;
  };
  addGlobalCallback(RecordFunctionCallback(begin).needsInputs(true).scopes({RecordScope::FUNCTION}));
}

void start(int num_devices, size_t capacity) {
  auto& s = simulator();
  s.num_devices = num_devices;
  s.capacity = capacity;
  s.next_stream.resize(num_devices);
  s.stats.resize(num_devices);
  for (int i = 0; i < num_devices; ++i) {
    int file = memfd_create("simulated-device", 0);
    TORCH_CHECK(file >= 0 && ftruncate(file, static_cast<off_t>(capacity)) == 0, "no memory for a simulated device");
    auto map = [&](int access_rights) {
      void* address = mmap(nullptr, capacity, access_rights, MAP_SHARED | MAP_NORESERVE, file, 0);
      TORCH_CHECK(address != MAP_FAILED, "no addresses for a simulated device");
      return static_cast<char*>(address);
    };
    s.arenas.push_back({map(PROT_NONE), map(PROT_READ | PROT_WRITE), 0});
    close(file);
  }
  c10::SetAllocator(kSim, &device_memory);
  at::RegisterPrivateUse1HooksInterface(&hooks);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("start", &start);
  m.def("default_generator", [](int device) { return default_generator(static_cast<DeviceIndex>(device)); });
  m.def("host_view", &on_host);
  // Records that the current stream uses a tensor, as a kernel does; for collectives, which run in other threads.
  m.def("access", [](const Tensor& tensor, bool writes, const std::string& name) {
    Operation(tensor.device().index(), name).use(tensor, writes);
  });
  m.def("races", [] {
    Lock lock(simulator().mutex);
    return simulator().races;
  });
  m.def("lock_pages", [](size_t address, size_t size) {
    std::lock_guard<std::mutex> lock(PinnedMemory::mutex);
    PinnedMemory::locked[reinterpret_cast<const char*>(address)] = size;
  });
  m.def("unlock_pages", [](size_t address) {
    std::lock_guard<std::mutex> lock(PinnedMemory::mutex);
    TORCH_CHECK(PinnedMemory::locked.erase(reinterpret_cast<const char*>(address)), "the block is not locked");
  });
  m.def("registered_bytes", [] {
    std::lock_guard<std::mutex> lock(PinnedMemory::mutex);
    size_t sum = 0;
    for (auto& [address, size] : PinnedMemory::locked) sum += size;
    return sum;
  });
  // Memory of a device that is not the allocator's, as of a communicator of NCCL; a negative size gives it back.
  m.def("take_memory", [](int device, int64_t size) {
    Lock lock(simulator().mutex);
    TORCH_CHECK(size <= free_memory(device), "unhandled cuda error: Cuda failure 2 'out of memory'");
    simulator().outside[device] += size;
  });
  m.def("set_limit", [](size_t limit) { simulator().limit = limit; });
  m.def("start_counting", [] {
    Lock lock(simulator().mutex);
    simulator().counts.clear();
    if (!std::exchange(simulator().is_counting, true)) count_messages();
  });
  m.def("counts", [] {
    Lock lock(simulator().mutex);
    return simulator().counts;
  });
  m.def("count", &count, py::arg("name"), py::arg("number") = 1);
  // Sets whether what the calling thread does is counted; returns whether it was.
  m.def("set_counted", [](bool value) { return std::exchange(is_counted, value); });
  m.def("locked_bytes", [] {
    std::lock_guard<std::mutex> lock(PinnedMemory::mutex);
    size_t sum = 0;
    for (auto* blocks : {&PinnedMemory::sizes, &PinnedMemory::locked})
      for (auto& [address, size] : *blocks) sum += size;
    for (auto* address : PinnedMemory::free_addresses) sum -= PinnedMemory::sizes[address];
    return sum;
  });
  m.def("num_synchronizations", [] { return simulator().num_synchronizations; });
  m.def("fail_allocation", [](int64_t number) { simulator().allocations_until_failure = number - 1; });
  m.def("fail_device", [](int device, const std::string& message) {
    Lock lock(simulator().mutex);
    simulator().errors[device] = message;
  });
}
