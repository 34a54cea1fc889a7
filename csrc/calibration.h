// The calibration of a host: tunables measured by running operations on two ranks that are threads of
// this process, pinned to two cores, and read each other's memory through the kernel as processes do.
// It takes some tens of milliseconds. Times are the least of several, interleaved with their rivals, so
// that other programs disturb them little; a way other than the default must be clearly faster.
#pragma once

#include <vector>

#include "tunables.h"

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

/// Measure. Throws Fault and std::exception where no group can be made.
Calibration calibrate();

}  // namespace tilework
