// CRC-32 as zlib, gzip and PNG have it (reflected, polynomial 0x04C11DB7), at the speed of memory.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tilework {

/// The checksum of `bytes` bytes that follow data whose checksum is `crc` (0: none).
uint32_t crc32(const void* data, size_t bytes, uint32_t crc = 0);

/// Likewise, and copy them past the caches on the way. Others see the copy after fence_streamed_copies().
uint32_t copy_crc32(void* to, const void* data, size_t bytes, uint32_t crc = 0);

}  // namespace tilework
