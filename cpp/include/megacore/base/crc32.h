// CRC-32 of zlib and zip (reflected polynomial 0xEDB88320) at the speed of memory, by carry-less
// multiplication where the processor has it.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace megacore::base {

// Checksum of `data`, continuing from the checksum `crc` of the bytes before it; 0 at the start.
uint32_t crc32(std::span<const std::byte> data, uint32_t crc = 0);

// Checksum of two ranges of bytes, one after the other, from their checksums and the number of
// bytes of the second.
uint32_t crc32_combine(uint32_t first, uint32_t second, uint64_t num_bytes_second);

// Whether this processor has carry-less multiplication. Without it, zlib is faster than `crc32`.
bool has_fast_crc32();

}  // namespace megacore::base
