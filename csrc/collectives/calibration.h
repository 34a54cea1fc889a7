// The calibration of a host: tunables measured by running operations on some ranks that are threads of
// this process, on CPUs of their own as far as there are, which read each other's memory through the kernel
// as processes do. It takes some 0.3 s.
//
// It sees what programs see: pages of the kind that their tensors have, all cores at work, messages up to
// sizes that leave the second-level cache. Two ways at a time are measured by turns; a turn in which another
// program took a core is measured again, for a while. A way other than the default must be clearly faster in
// nearly every turn.
#pragma once

#include <vector>

#include "transport/tunables.h"

namespace tilework {

/// The time of an operation with messages of `bytes`, done in one of two ways.
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

/// Measure with `ranks` ranks, an even number, on the first of `cpus`, which need not be in this process's affinity:
/// those of a job whose ranks are bound to one each are not. `huge`: long tensors have huge pages. Throws
/// Fault and std::exception where no group can be made, and std::runtime_error where other programs keep
/// taking the cores, unless `insists`.
Calibration calibrate(const std::vector<int>& cpus, int ranks, bool huge, bool insists);

}  // namespace tilework
