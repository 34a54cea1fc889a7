// What ranks know of how tensors came about: a digest that collectives carry in their headers, and the
// hash of contents that it starts from.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tilework {

/// The digest that collectives which this thread calls are to carry; 0: none.
uint64_t& thread_provenance();

/// A hash of a tensor's elements, which lie one after the other. Not for adversaries.
uint64_t hash_content(const char* data, size_t bytes);

/// The same of `samples` elements at even distances in row-major order, the first and the last among
/// them: at least two, of as many. `strides` count elements.
uint64_t hash_samples(const char* data, const std::vector<int64_t>& shape,
                      const std::vector<int64_t>& strides, size_t item_bytes, size_t samples);

}  // namespace tilework
