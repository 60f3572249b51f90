// An emulated accelerator for tests: PrivateUse1 under the name "emu".
//
// One device. Its memory is apart from the host's (memory.h), and its kernels
// are the CPU's, run on that memory by the threads of its streams (stream.h),
// so results have the CPU's bits and come later. torch keeps pointers to what
// is registered here for as long as the process lives, so this is the one place
// with globals.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/StorageImpl.h>

#include <cstddef>

#include "adapters/emulated/allocators.h"
#include "adapters/emulated/memory.h"
#include "adapters/emulated/streams.h"
#include "zinf/status.h"

namespace zinf::emulated {

inline const c10::Device kDevice(c10::DeviceType::PrivateUse1, 0);

// Makes the device and registers it with torch. Once per process, and before
// its first backward pass: autograd counts the devices there.
Status start(std::size_t memory_bytes);

// All after start().
DeviceMemory& memory();
Streams& streams();
DeviceAllocator& device_allocator();
PinnedAllocator& pinned();

// Throws unless the index is the device's, or -1 for the current one.
void check_index(c10::DeviceIndex index);

// Gives the storage a block of its own of this size that starts with the
// `bytes` bytes at `content` (a kernel's address), and frees the old one.
void replace_content(c10::StorageImpl& storage, std::size_t new_bytes,
                     const void* content, std::size_t bytes);

// Parts of start(). Autocast has torch's lists for accelerators, so with it
// bits are not the CPU's.
void register_guard();
void register_operators();
void register_autocast();

}  // namespace zinf::emulated
