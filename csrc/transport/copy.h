// Copies between private memory and the segment.
#pragma once

#include <string.h>

#include <cstddef>
#include <cstdint>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace tilework {

/// Outputs of this length or more do not stay in a cache.
constexpr size_t kStreamedBytes = 4 * 1024 * 1024;

inline void copy(void* to, const void* from, size_t bytes) {
  if (bytes > 0 && to != from) memcpy(to, from, bytes);
}

/// Copy past the caches; others see it after fence_streamed_copies().
inline void copy_past_caches(void* to, const void* from, size_t bytes) {
#if defined(__SSE2__)
  constexpr size_t kStep = 64, kVector = sizeof(__m128i);
  auto* target = static_cast<char*>(to);
  auto* source = static_cast<const char*>(from);
  size_t done = -reinterpret_cast<uintptr_t>(to) % kStep;
  if (done > bytes) done = bytes;
  copy(target, source, done);
  for (; done + kStep <= bytes; done += kStep)
    for (size_t i = 0; i < kStep; i += kVector)
      _mm_stream_si128(reinterpret_cast<__m128i*>(target + done + i),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + done + i)));
  copy(target + done, source + done, bytes - done);
#else
  copy(to, from, bytes);
#endif
}

inline void fence_streamed_copies() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

/// Copy past the cache, for outputs that do not fit it anyway: an ordinary store first reads the
/// line that it is about to overwrite, a third of all traffic. memcpy does this by itself for one
/// long copy, not for the pieces of one.
inline void copy_streaming(void* to, const void* from, size_t bytes) {
  if (to == from || bytes < 4096) return copy(to, from, bytes);
  copy_past_caches(to, from, bytes);
  fence_streamed_copies();
}

}  // namespace tilework
