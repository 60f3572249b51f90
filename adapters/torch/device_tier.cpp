#include "adapters/torch/device_tier.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <exception>
#include <utility>

#include "adapters/torch/keys.h"

namespace zinf {
namespace {

at::Tensor bytes_at(const std::byte* data, std::size_t bytes,
                    c10::Device device) {
  std::int64_t size = static_cast<std::int64_t>(bytes);
  return at::for_blob(const_cast<std::byte*>(data), {size})
      .options(at::TensorOptions().dtype(at::kByte).device(device))
      .target_device(device)
      .make_tensor();
}

Status copy(std::byte* to, c10::Device to_device, const std::byte* from,
            c10::Device from_device, std::size_t bytes) {
  try {
    at::NoGradGuard no_grad;
    // init() must not take what is made here for the model's.
    c10::impl::ExcludeDispatchKeyGuard not_ours(kOuterKey);
    bytes_at(to, bytes, to_device).copy_(bytes_at(from, bytes, from_device));
    return {};
  } catch (const std::exception& error) {
    return Status::error(Code::kIo, error.what());
  }
}

// Blocks from torch's allocator of the device, counted in the budget.
Allocate device_memory(Budget budget, c10::Device device) {
  struct Owner {
    Reservation reservation;
    c10::DataPtr memory;
  };
  return [budget, device](std::size_t bytes) -> Result<Block> {
    ZINF_ASSIGN(Reservation reservation, budget.reserve(Tag::kUnit, bytes));
    c10::DeviceGuard guard(device);
    try {
      auto owner = std::make_shared<Owner>(
          Owner{std::move(reservation),
                c10::GetAllocator(device.type())->allocate(bytes)});
      auto* data = static_cast<std::byte*>(owner->memory.get());
      return Block{{data, bytes}, std::move(owner)};
    } catch (const std::exception& error) {
      return Status::error(Code::kOverBudget, error.what());
    }
  };
}

Role role_of(const StateSpec& spec) {
  for (Role role : {Role::kWeight, Role::kGrad}) {
    if (spec.state == role_name(role)) return role;
  }
  return Role::kState;  // each has its own name
}

DeviceCopies copies_to(c10::Device device) {
  return {
      .to_device =
          [device](std::span<std::byte> to, std::span<const std::byte> from) {
            return copy(to.data(), device, from.data(), at::kCPU, to.size());
          },
      .to_host =
          [device](std::span<std::byte> to, std::span<const std::byte> from) {
            return copy(to.data(), at::kCPU, from.data(), device, to.size());
          }};
}

}  // namespace

Result<std::unique_ptr<DeviceTier>> DeviceTier::create(
    HostTier& host, c10::Device device, const DeviceTierOptions& options,
    std::function<Leave(StateRef, void* owner)> leaving) {
  std::uint64_t limit = options.bytes == 0 ? kAddressSpaceBytes : options.bytes;
  ZINF_ASSIGN(Budget budget, Budget::create("device_memory", limit));
  // The host decides where a state lives by its role.
  auto add = [&host](const StateSpec& spec) {
    return host.add(spec, role_of(spec), nullptr);
  };
  return std::unique_ptr<DeviceTier>(new DeviceTier(
      host, budget,
      {.allocate = device_memory(budget, device),
       .backing = host_backing(host.residency(), copies_to(device), add),
       .leaving = std::move(leaving),
       .away_limit_bytes = options.away_bytes}));
}

Result<StateRef> DeviceTier::add(const StateSpec& spec, Role role,
                                 void* owner) {
  return residency_.add(spec, home_of(role), owner);
}

Home DeviceTier::home_of(Role role) const {
  bool free = host_.options().where(role) == Where::kAuto;
  return free ? Home::kBelow : Home::kAway;
}

Reservation DeviceTier::count(Tag tag, std::uint64_t bytes) {
  return reserve_or_exceed(budget_, tag, bytes,
                           [&] { (void)residency_.make_room(bytes); });
}

}  // namespace zinf
