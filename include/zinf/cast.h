// Casts between element types, and the fp32 master weight in two halves.
//
// [Note: one cast rule] To bf16: to nearest, ties away from zero. To fp16: to
// nearest, ties to even. NaN becomes the canonical NaN (0x7FC0, 0x7E00 and,
// from fp16, 0x7FC00000). Every format of the optimizer states uses these
// casts, so that the format never changes a weight.
//
// Ties away make a master reconstructible from its bf16 weight and 16 more
// bits: `high` is the cast of the master, `low` are its lower 16 bits, and the
// master's bits are (high << 16) + low, where low counts as a signed number.
// All 2^32 bit patterns that are not NaN come back exactly.
//
// All functions are thread-safe; buffers of one call must not overlap, must be
// aligned to their element type, and are split over the threads of `pool`
// (null: the caller's thread alone). The number of threads never changes a bit.
#pragma once

#include <cstddef>
#include <cstdint>

#include "zinf/dtype.h"

namespace zinf {

class ThreadPool;

// float32 <-> the narrow types. bf16 to fp32 keeps NaN bits as they are.
void narrow(const float* from, Dtype to_dtype, void* to, std::size_t count,
            ThreadPool* pool = nullptr);
void widen(Dtype from_dtype, const void* from, float* to, std::size_t count,
           ThreadPool* pool = nullptr);

void split_master(const float* master, std::uint16_t* high, std::uint16_t* low,
                  std::size_t count, ThreadPool* pool = nullptr);
void join_master(const std::uint16_t* high, const std::uint16_t* low,
                 float* master, std::size_t count, ThreadPool* pool = nullptr);

// A narrow weight that somebody has edited: where it is not the cast of its
// master any more, the master becomes the weight; other elements keep theirs.
// Returns how many were edited.
std::size_t follow_edits(Dtype dtype, const void* weight, float* master,
                         std::size_t count, ThreadPool* pool = nullptr);

}  // namespace zinf
