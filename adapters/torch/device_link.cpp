#include "adapters/torch/device_link.h"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <utility>

#include "adapters/torch/keys.h"
#include "adapters/torch/manager.h"
#include "src/tier/checksum.h"
#include "zinf/log.h"

namespace zinf {
namespace {

// Two buffers per direction: one is filled while the other is copied.
constexpr std::size_t kBuffers = 2;
constexpr std::size_t kBufferBytes = std::size_t{4} << 20;

bool skipped(DeviceWait wait) {
  return skipped_waits[static_cast<std::size_t>(wait)];
}

at::Tensor bytes_at(const void* data, std::size_t bytes, c10::Device device) {
  std::int64_t size = static_cast<std::int64_t>(bytes);
  return at::for_blob(const_cast<void*>(data), {size})
      .options(at::TensorOptions().dtype(at::kByte).device(device))
      .target_device(device)
      .make_tensor();
}

// Queues the copy on the current stream.
void copy(void* to, c10::Device to_device, const void* from,
          c10::Device from_device, std::size_t bytes) {
  at::NoGradGuard no_grad;
  // init() must not take what is made here for the model's.
  c10::impl::ExcludeDispatchKeyGuard not_ours(kOuterKey);
  bytes_at(to, bytes, to_device)
      .copy_(bytes_at(from, bytes, from_device), /*non_blocking=*/true);
}

c10::Event recorded_on(const c10::Stream& stream) {
  c10::Event event(stream.device_type());
  event.record(stream);
  return event;
}

// Of a use that has not ended: now.
template <typename Use>
const c10::Event& end_of(Use& use) {
  if (!use.ended) use.end.record(use.stream);
  return use.end;
}

}  // namespace

Result<std::shared_ptr<DeviceLink>> DeviceLink::create(
    c10::Device device, std::function<Reservation(std::uint64_t)> count) {
  try {
    c10::impl::VirtualGuardImpl guard(device.type());
    c10::Stream in = guard.getStreamFromGlobalPool(device);
    c10::Stream out = guard.getStreamFromGlobalPool(device);
    return std::shared_ptr<DeviceLink>(
        new DeviceLink(device, in, out, std::move(count)));
  } catch (const std::exception& error) {
    return Status::error(Code::kUnsupported,
                         device.str() + " has no streams: " + error.what());
  }
}

DeviceLink::DeviceLink(c10::Device device, c10::Stream in, c10::Stream out,
                       std::function<Reservation(std::uint64_t)> count)
    : device_(device), in_(in), out_(out), count_(std::move(count)) {}

Result<Block> DeviceLink::allocate(std::size_t bytes, Reservation reservation) {
  try {
    c10::StreamGuard on_copies(in_);
    return own(c10::GetAllocator(device_.type())->allocate(bytes), bytes,
               std::move(reservation), Maker::kLink);
  } catch (const c10::OutOfMemoryError& error) {
    return Status::error(Code::kOverBudget, error.what_without_backtrace());
  } catch (const std::exception& error) {
    return Status::error(Code::kIo, error.what());
  }
}

Block DeviceLink::take(c10::DataPtr memory, std::size_t bytes,
                       Reservation reservation) {
  return own(std::move(memory), bytes, std::move(reservation), Maker::kOther);
}

Block DeviceLink::own(c10::DataPtr memory, std::size_t bytes,
                      Reservation reservation, Maker maker) {
  struct Owner {
    std::shared_ptr<DeviceLink> link;
    Reservation reservation;
    c10::DataPtr memory;
    ~Owner() { link->free(memory); }
  };
  auto* data = static_cast<std::byte*>(memory.get());
  std::shared_ptr<Owner> owner(
      new Owner{shared_from_this(), std::move(reservation), std::move(memory)});
  std::lock_guard lock(mutex_);
  Uses& uses = blocks_[data];  // of one that was released and comes back too
  if (maker == Maker::kLink) {
    uses.ours = true;
    uses.arrival = recorded_on(in_);  // the stream may still be busy with it
  }
  return {{data, bytes}, std::move(owner)};
}

// Its memory is given back right after this.
void DeviceLink::free(const c10::DataPtr& memory) {
  if (in_forked_child()) return;
  Uses uses;
  {
    std::lock_guard lock(mutex_);
    auto known = blocks_.extract(static_cast<const std::byte*>(memory.get()));
    if (!known.empty()) uses = std::move(known.mapped());
  }
  if (skipped(DeviceWait::kFree)) return;
  try {
    for (StreamUse& use : uses.streams) {
      if (uses.ours) {
        end_of(use).block(in_);
      } else {
        c10::getDeviceAllocator(device_.type())
            ->recordStream(memory, use.stream);
      }
    }
  } catch (const std::exception& error) {
    log(LogLevel::kError, "%s: %s", device_.str().c_str(), error.what());
  }
}

c10::Stream DeviceLink::current_stream() const {
  return c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
}

DeviceLink::StreamUse& DeviceLink::Uses::of(const c10::Stream& stream) {
  auto known = std::ranges::find(streams, stream, &StreamUse::stream);
  if (known != streams.end()) return *known;
  return streams.emplace_back(stream, c10::Event(stream.device_type()));
}

void DeviceLink::before_use(const std::byte* block) {
  c10::Stream stream = current_stream();
  std::lock_guard lock(mutex_);
  auto known = blocks_.find(block);
  if (known == blocks_.end()) return;
  Uses& uses = known->second;
  uses.of(stream).ended = false;
  if (!uses.arrival || skipped(DeviceWait::kArrival)) return;
  if (uses.arrival->query()) {
    uses.arrival.reset();
  } else {
    uses.arrival->block(stream);
  }
}

void DeviceLink::after_use(const std::byte* block) noexcept {
  try {
    c10::Stream stream = current_stream();
    std::lock_guard lock(mutex_);
    auto known = blocks_.find(block);
    if (known == blocks_.end()) return;
    StreamUse& use = known->second.of(stream);
    use.end.record(stream);
    use.ended = true;
  } catch (const std::exception& error) {  // whoever computes is told too
    log(LogLevel::kError, "%s: %s", device_.str().c_str(), error.what());
  }
}

Status DeviceLink::hand_out(const std::byte* block) {
  try {
    std::optional<c10::Event> arrival;
    {
      std::lock_guard lock(mutex_);
      auto known = blocks_.find(block);
      if (known == blocks_.end()) return {};
      arrival = std::exchange(known->second.arrival, std::nullopt);
    }
    if (arrival) arrival->synchronize();
    before_use(block);
    return {};
  } catch (const std::exception& error) {
    return Status::error(Code::kIo, error.what());
  }
}

void DeviceLink::wait_for_computing() const { current_stream().synchronize(); }

void DeviceLink::drop_staging() {
  for (Staging* staging : {&to_device_, &to_host_}) {
    std::lock_guard lock(staging->mutex);
    try {
      for (Buffer& buffer : staging->buffers) {
        if (buffer.copied) buffer.copied->synchronize();
      }
    } catch (const std::exception& error) {
      log(LogLevel::kError, "%s: %s", device_.str().c_str(), error.what());
    }
    staging->buffers.clear();
  }
}

void DeviceLink::follow_uses(const std::byte* block, c10::Stream copies) {
  std::lock_guard lock(mutex_);
  auto known = blocks_.find(block);
  if (known == blocks_.end()) return;
  Uses& uses = known->second;
  if (uses.arrival && !skipped(DeviceWait::kArrival)) {
    uses.arrival->block(copies);
  }
  if (skipped(DeviceWait::kUses)) return;
  for (StreamUse& use : uses.streams) end_of(use).block(copies);
}

c10::DataPtr DeviceLink::pinned_memory(std::size_t bytes) const {
  try {
    return at::getHostAllocator(device_.type())->allocate(bytes);
  } catch (const std::exception& error) {
    log(LogLevel::kWarning,
        "%s: no pinned memory, so copies do not run beside the computing: %s",
        device_.str().c_str(), error.what());
    return c10::GetAllocator(at::kCPU)->allocate(bytes);
  }
}

DeviceLink::Buffer& DeviceLink::next_buffer(Staging& staging,
                                            std::size_t bytes) {
  if (staging.buffers.empty()) staging.buffers.resize(kBuffers);
  Buffer& buffer = staging.buffers[staging.next];
  staging.next = (staging.next + 1) % kBuffers;
  bool larger = buffer.bytes < bytes;
  if (buffer.copied && (larger || !skipped(DeviceWait::kStaging))) {
    buffer.copied->synchronize();
  }
  if (larger) {
    buffer = {};
    buffer.reservation = count_(bytes);
    buffer.memory = pinned_memory(bytes);
    buffer.bytes = bytes;
  }
  return buffer;
}

void DeviceLink::to_device_in_pieces(std::span<std::byte> device,
                                     std::span<const std::byte> host) {
  std::lock_guard one_at_a_time(to_device_.mutex);
  c10::StreamGuard on_copies(in_);
  for (std::size_t at = 0; at < host.size(); at += kBufferBytes) {
    std::size_t bytes = std::min(kBufferBytes, host.size() - at);
    Buffer& buffer = next_buffer(to_device_, bytes);
    std::memcpy(buffer.memory.get(), host.data() + at, bytes);
    copy(device.data() + at, device_, buffer.memory.get(), at::kCPU, bytes);
    buffer.copied = recorded_on(in_);
  }
  std::lock_guard lock(mutex_);
  auto known = blocks_.find(device.data());
  if (known != blocks_.end()) known->second.arrival = recorded_on(in_);
}

void DeviceLink::to_host_in_pieces(std::span<const std::byte> device,
                                   const Take& take) {
  std::lock_guard one_at_a_time(to_host_.mutex);
  c10::StreamGuard on_copies(out_);
  struct Piece {
    Buffer* buffer = nullptr;
    std::size_t at = 0;
    std::size_t bytes = 0;
  };
  auto finish = [&](const Piece& piece) {
    if (piece.buffer == nullptr) return;
    piece.buffer->copied->synchronize();
    take(piece.at, {static_cast<const std::byte*>(piece.buffer->memory.get()),
                    piece.bytes});
  };
  Piece last;
  for (std::size_t at = 0; at < device.size(); at += kBufferBytes) {
    std::size_t bytes = std::min(kBufferBytes, device.size() - at);
    Piece piece{&next_buffer(to_host_, bytes), at, bytes};
    copy(piece.buffer->memory.get(), at::kCPU, device.data() + at, device_,
         bytes);
    piece.buffer->copied = recorded_on(out_);
    finish(last);
    last = piece;
  }
  finish(last);
}

Status DeviceLink::to_device(std::span<std::byte> device,
                             std::span<const std::byte> host) {
  try {
    follow_uses(device.data(), in_);  // none, where it is new
    to_device_in_pieces(device, host);
    return {};
  } catch (const std::exception& error) {
    return Status::error(Code::kIo, error.what());
  }
}

Status DeviceLink::to_host(std::span<std::byte> host,
                           std::span<const std::byte> device) {
  try {
    follow_uses(device.data(), out_);
    to_host_in_pieces(
        device.first(host.size()), [&](std::size_t at, auto piece) {
          std::memcpy(host.data() + at, piece.data(), piece.size());
        });
    return {};
  } catch (const std::exception& error) {
    return Status::error(Code::kIo, error.what());
  }
}

Result<std::uint64_t> DeviceLink::hash(std::span<const std::byte> device) {
  try {
    follow_uses(device.data(), out_);
    std::vector<std::uint64_t> hashes;
    to_host_in_pieces(device, [&](std::size_t, auto piece) {
      hashes.push_back(tier::checksum(piece));
    });
    return tier::checksum(std::as_bytes(std::span(hashes)));
  } catch (const std::exception& error) {
    return Status::error(Code::kIo, error.what());
  }
}

}  // namespace zinf
