// The calibration of a host: tunables measured by running operations on two ranks that are threads of
// this process, each on a CPU of its own, which read each other's memory through the kernel as
// processes do. It takes some 0.3 s.
//
// It sees what programs see: memory as the allocator gives it, both cores at work, messages up to sizes
// that leave the second-level cache. Ways are measured by turns; a turn in which another program took
// a core is measured again, for a while. A way other than the default must be clearly faster in nearly every
// turn: at each size from one on, or for reading peers' memory, within a range of sizes.
#pragma once

#include <vector>

#include "transport/tunables.h"

namespace tilework {

/// The time of an operation of two ranks, of `bytes` each, done in one of two or more ways.
struct Measurement {
  const char* operation;
  const char* way;
  uint64_t bytes;
  double seconds;
};

struct Calibration {
  Tunables tunables;
  std::vector<Measurement> measurements;
};

/// Measure on the first two of `cpus`, which need not be in this process's affinity: those of a job whose
/// ranks are bound to one each are not. Throws Fault and std::exception where no group can be made, and std::runtime_error where
/// other programs keep taking the cores, unless `insists`.
Calibration calibrate(const std::vector<int>& cpus, bool insists);

}  // namespace tilework
