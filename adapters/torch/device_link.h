// A device's memory and the host's, and copies between them.
//
// Note [Order on a device]: work on a device is queued and done later, and its
// streams do not wait for each other. Copies have streams of their own, one for
// each direction, so that they pass by the computing. Four waits keep contents
// right; those on the device's side cost the host nothing:
//
//   kArrival  whoever computes with a block waits for the copy that fills it
//   kUses     the copy of a block to the host, or over it, waits for who
//             computes with it
//   kFree     copies into memory that was freed wait for who computed with it
//   kStaging  staging memory is used again when the copy out of it is done:
//   here
//             a thread of the host's waits
//
// Only torch's generic interfaces are used: streams, events and allocators are
// those of whatever device it is.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "zinf/block.h"
#include "zinf/budget.h"
#include "zinf/status.h"

namespace zinf {

enum class DeviceWait : std::uint8_t { kArrival, kUses, kFree, kStaging };
inline constexpr std::size_t kNumDeviceWaits = 4;
// For tests: what is skipped is missed. By kind.
inline std::atomic<bool> skipped_waits[kNumDeviceWaits] = {};

// Thread-safe. Blocks keep it alive.
class DeviceLink : public std::enable_shared_from_this<DeviceLink> {
 public:
  // `count` gives host memory to the pinned staging buffers.
  static Result<std::shared_ptr<DeviceLink>> create(
      c10::Device device, std::function<Reservation(std::uint64_t)> count);

  // Torch's memory of the device; the reservation goes with it.
  Result<Block> allocate(std::size_t bytes, Reservation reservation);
  // Memory that somebody else has made.
  Block take(c10::DataPtr memory, std::size_t bytes, Reservation reservation);

  // The host's bytes were read when it returns; the copy may be under way.
  Status to_device(std::span<std::byte> device,
                   std::span<const std::byte> host);
  // The host has the bytes when it returns.
  Status to_host(std::span<std::byte> host, std::span<const std::byte> device);

  // The same for the same bytes.
  Result<std::uint64_t> hash(std::span<const std::byte> device);

  // Around what the calling thread gives its current stream to do with a block,
  // named by where it begins. A use without an end lasts until it is asked for.
  void before_use(const std::byte* block);
  void after_use(const std::byte* block) noexcept;
  // Waits for the copy that fills it. From here on somebody else uses it, and
  // tells nobody: a use without an end.
  Status hand_out(const std::byte* block);

  // Until the current stream has nothing left to do: what comes then is not
  // ahead of anything.
  void wait_for_computing() const;

  // At the end of the tier; released blocks may keep the link.
  void drop_staging();

 private:
  // What a stream does with a block, up to the event.
  struct StreamUse {
    c10::Stream stream;
    c10::Event end;
    bool ended = false;
  };
  struct Uses {
    bool ours = false;  // it belongs to the stream of copies
    std::optional<c10::Event> arrival = {};
    std::vector<StreamUse> streams = {};

    StreamUse& of(const c10::Stream& stream);
  };
  struct Buffer {
    c10::DataPtr memory = {};
    std::size_t bytes = 0;
    Reservation reservation = {};
    std::optional<c10::Event> copied = {};
  };
  // Pinned buffers of one direction, used in turn by one copy at a time.
  struct Staging {
    std::mutex mutex;
    std::vector<Buffer> buffers;
    std::size_t next = 0;
  };

  DeviceLink(c10::Device device, c10::Stream in, c10::Stream out,
             std::function<Reservation(std::uint64_t)> count);
  enum class Maker : std::uint8_t { kLink, kOther };
  Block own(c10::DataPtr memory, std::size_t bytes, Reservation reservation,
            Maker maker);
  void free(const c10::DataPtr& memory);
  // The next one, of at least so many bytes, that nobody copies any more.
  Buffer& next_buffer(Staging& staging, std::size_t bytes);
  c10::DataPtr pinned_memory(std::size_t bytes) const;
  void to_device_in_pieces(std::span<std::byte> device,
                           std::span<const std::byte> host);
  // Gives `take` one piece after the other, where the host has it.
  using Take = std::function<void(std::size_t at, std::span<const std::byte>)>;
  void to_host_in_pieces(std::span<const std::byte> device, const Take& take);
  // A stream of copies waits for all that the block is used for.
  void follow_uses(const std::byte* block, c10::Stream copies);
  c10::Stream current_stream() const;

  const c10::Device device_;
  const c10::Stream in_;  // blocks belong to it
  const c10::Stream out_;
  const std::function<Reservation(std::uint64_t)> count_;
  Staging to_device_;
  Staging to_host_;
  std::mutex mutex_;
  std::unordered_map<const std::byte*, Uses> blocks_;
};

}  // namespace zinf
