// The failures of operations. Misuse is std::invalid_argument (Python's
// ValueError), thrown before anything moves; a failure between ranks is a Fault.
#pragma once

#include <exception>
#include <string>
#include <vector>

namespace tilework {

/// kind is "mismatch", "peer_lost", "timeout", "aborted" or "closed"; ranks are those at fault.
struct Fault : std::exception {
  Fault(const char* kind_, std::vector<int> ranks_, std::string text_)
      : kind(kind_), ranks(std::move(ranks_)), text(std::move(text_)) {}
  const char* what() const noexcept override { return text.c_str(); }

  std::string kind;
  std::vector<int> ranks;
  std::string text;
};

/// A signal handler of the interpreter raised; its exception is pending in the calling thread.
struct Interrupted : std::exception {
  const char* what() const noexcept override { return "interrupted by a signal"; }
};

/// "rank 3" or "ranks 1, 2, 7 and 60 more".
std::string format_ranks(const std::vector<int>& ranks);

}  // namespace tilework
