// What torch asks of a device: its streams and its events.
#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <memory>

#include "adapters/emulated/device.h"

namespace zinf::emulated {
namespace {

using TimePoint = std::chrono::steady_clock::time_point;

struct Event {
  Mark mark;
  std::shared_ptr<TimePoint> time;  // once the mark is reached
};

Event& event_of(void* event) { return *static_cast<Event*>(event); }

c10::Stream stream_with(Streams::Id id) {
  return c10::Stream(c10::Stream::UNSAFE, kDevice,
                     static_cast<c10::StreamId>(id));
}

Stream& stream_of(const c10::Stream& stream) {
  return streams().get(static_cast<Streams::Id>(stream.id()));
}

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kDevice.type(); }
  c10::Device getDevice() const override { return kDevice; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Device exchangeDevice(c10::Device device) const override {
    check_index(device.index());
    return kDevice;
  }
  void setDevice(c10::Device device) const override {
    check_index(device.index());
  }
  void uncheckedSetDevice(c10::Device) const noexcept override {}

  c10::Stream getStream(c10::Device) const override {
    return stream_with(Streams::current());
  }
  c10::Stream getDefaultStream(c10::Device) const override {
    return stream_with(0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override {
    return stream_with(streams().next());
  }
  c10::Stream getNewStream(c10::Device, int) const override {
    return stream_with(streams().next());
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto id = static_cast<Streams::Id>(stream.id());
    return stream_with(Streams::exchange_current(id));
  }
  bool queryStream(const c10::Stream& stream) const override {
    return mark(stream_of(stream)).done();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    mark(stream_of(stream)).wait();
    stream_of(stream).check();
  }
  void synchronizeDevice(c10::DeviceIndex) const override {
    streams().synchronize();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data,
                             const c10::Stream& stream) const override {
    device_allocator().recordStream(data, stream);
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex,
              c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event;
    auto time = std::make_shared<TimePoint>();
    Stream& of = stream_of(stream);
    auto note_time = [time] { *time = std::chrono::steady_clock::now(); };
    event_of(*event) = {{&of, of.enqueue("", note_time)}, time};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) hold(stream_of(stream), event_of(event).mark);
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || event_of(event).mark.done();
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    event_of(event).mark.wait();
    event_of(event).mark.stream->check();
  }
  double elapsedTime(void* from, void* to, c10::DeviceIndex) const override {
    event_of(from).mark.wait();
    event_of(to).mark.wait();
    auto elapsed = *event_of(to).time - *event_of(from).time;
    return std::chrono::duration<double, std::milli>(elapsed).count();
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
};

}  // namespace

void register_guard() {
  c10::impl::DeviceGuardImplRegistrar(kDevice.type(), new Guard);
}

}  // namespace zinf::emulated
