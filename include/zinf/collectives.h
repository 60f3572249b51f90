// Collectives, made of messages: the same bits on every back end.
//
// Every rank of the group calls the same ones in the same order. They return at
// once; the memory that they are given stays until they are over. A result is
// there when wait() has returned ok, on the thread that waits: sums are made
// there. Sums are in the order of ranks.
//
// Messages per rank go directly to and from every other one: as many bytes as
// a ring, in fewer turns.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "zinf/comm.h"

namespace zinf {

// `all` has a part for each rank, as large as `own`, which may be this rank's
// part.
std::unique_ptr<Move> all_gather(Comm& comm, std::span<const std::byte> own,
                                 std::span<std::byte> all);

// `all` has a part for each rank, as large as `own`, which becomes the sum of
// this rank's parts of all ranks; `own` may be this rank's part. Needs memory
// for the other ranks' parts of it.
std::unique_ptr<Move> reduce_scatter(Comm& comm, std::span<const float> all,
                                     std::span<float> own);

// Every rank has the sum of all ranks' afterwards, the same bits. For few
// values: all of them go to everybody.
std::unique_ptr<Move> all_reduce(Comm& comm, std::span<float> values);
std::unique_ptr<Move> all_reduce(Comm& comm, std::span<double> values);

// Every rank has what the root had.
std::unique_ptr<Move> broadcast(Comm& comm, int root,
                                std::span<std::byte> content);

// Over when every rank has come to it.
std::unique_ptr<Move> barrier(Comm& comm);

}  // namespace zinf
