// Every number that the forecasts assume, in one place, with where it comes
// from. All tables and figures use these; none has its own.
#pragma once

namespace zinf::plan {

inline constexpr double kKiB = 0x1p10;
inline constexpr double kGiB = 0x1p30;
inline constexpr double kTiB = 0x1p40;

// The share of a device's peak that the matrix products of a whole step reach
// when nothing is waited for. ZeRO-Infinity's headline (25 PFLOPS on 512 V100
// are 40 % of their peak of 125), and what its baseline without any offload,
// 3D parallelism, does: 48 and 47 TFLOPS (figures 5c and 5a).
inline constexpr double kAchieved = 0.40;

// Section 4 reckons with the rate of single products instead: 70 TFLOPS, the
// middle of 62 to 78 (hidden sizes from 8K to 64K, no communication).
inline constexpr double kProductFlops = 70e12;

// A DGX-2 (figure 2b): a V100 alone moves 12 GB/s to and from its host, 16 at
// once 3 each: four of them share an uplink. NVMe 1.6 each. Sizes are binary,
// as in figure 2a: 28 TB are eight drives of 3.84e12 bytes.
inline constexpr double kV100Link = 12e9;
inline constexpr int kV100sPerUplink = 4;
inline constexpr double kDgx2Nvme = 16 * 1.6e9;
inline constexpr double kDgx2HostMemory = 100e9;  // section 4
inline constexpr double kV100Memory = 600e9;      // the least of 600 to 900
// Inside a node 150 to 300 GB/s: the least. Between nodes 60 to 100: the 70
// that sections 4 and 9 reckon with.
inline constexpr double kV100Nvlink = 150e9;
inline constexpr double kDgx2Network = 70e9;

// Bytes of host memory that Adam touches per parameter: reads gradient, weight
// and two moments, writes the last three. (With the 100 GB/s above: 3.6
// Gparam/s; ZeRO-Offload measured 3.3 to 4.5.)
inline constexpr double kAdamBytes = 28;

// How far ahead of the compute the paper's prefetcher works, in layers
// (section 6.2): reads from NVMe, copies to the device, gathers.
inline constexpr int kReadsAhead = 3;
inline constexpr int kCopiesAhead = 2;
inline constexpr int kGathersAhead = 1;

// Memory for moves under way, in multiples of the states of a layer, or of a
// part: what is read, what is in use, what is written ("tens of GB" in the
// paper).
inline constexpr double kMovingParts = 3;

// Where devices compute in host memory a parameter is moved as it is used, not
// a layer: of a block those of an attention and of an MLP, two each.
inline constexpr double kPartsOfLayer = 4;

// A loss has a score for every word of the vocabulary, in fp32. At its worst
// moment there are so many of each: logarithms, which are kept for backward,
// and the gradients of these and of the scores.
inline constexpr double kScores = 3;
inline constexpr double kKeptScores = 1;

// The engine's arena gives torch blocks of 2 MiB.
inline constexpr double kRoundingBytes = 4 * 0x1p21;

}  // namespace zinf::plan
