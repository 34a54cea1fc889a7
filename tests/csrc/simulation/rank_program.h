// One rank of a trial: it runs the plan's steps, and checks what comes out.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "collectives/group.h"
#include "plan.h"

namespace tilework::simulation {

/// What all ranks of a trial share, of which they themselves know nothing.
struct Trial {
  Plan plan;
  std::vector<int> segments;  // file descriptors, by group
  std::vector<int> entered;   // ranks that have come to a step so far
  int joined = 0;             // ranks that have made their groups
  uint64_t operations = 0;    // that ended well
};

/// Run by the first fiber of each rank.
void run_rank(Trial& trial, int rank);

}  // namespace tilework::simulation
