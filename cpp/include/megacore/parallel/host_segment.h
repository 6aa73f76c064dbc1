// Memory that several processes of one host share.
//
// One process creates a segment under a name, the others open it by that name; once all have it,
// the name is removed and the memory lives until the last of them has closed it or died. Then
// nothing is left behind, however a process ends. Linux only: elsewhere `create` and `open` throw.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace megacore::parallel {

class HostSegment {
 public:
  // New memory, all zero. It is reserved at once, so that a full /dev/shm is an error here and not
  // a SIGBUS later.
  // REQUIRES: `name` is "/" and a file name; bytes >= 1.
  // Throws std::runtime_error with the system's reason.
  static HostSegment create(const std::string& name, int64_t bytes);

  // The memory that another process has created. Throws std::runtime_error if there is none of this
  // size.
  static HostSegment open(const std::string& name, int64_t bytes);

  // New memory without a name, all zero, reserved at once. It does not count against the size of
  // /dev/shm. Others open it by this process and file() until close_file().
  // Throws std::runtime_error with the system's reason.
  static HostSegment create_unnamed(int64_t bytes);

  // What the process `pid` has created as its file number `file`. Throws std::runtime_error if that
  // is not there, not of this size, or not allowed.
  static HostSegment open_unnamed(int64_t pid, int file, int64_t bytes);

  // Memory of the caller, for members that are threads of one process. Not freed.
  static HostSegment over(std::byte* data, int64_t bytes) { return {data, bytes, false}; }

  // Removes the name; whoever has the memory keeps it. Does nothing if there is no such name.
  static void remove(const std::string& name);

  HostSegment(HostSegment&& other) noexcept;
  HostSegment& operator=(HostSegment&&) = delete;
  ~HostSegment();

  std::byte* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  int file() const { return file_; }  // -1 if there is none (any more)
  void close_file();

 private:
  HostSegment(std::byte* data, int64_t bytes, bool is_mapped)
      : data_(data), bytes_(bytes), is_mapped_(is_mapped) {}

  std::byte* data_;
  int64_t bytes_;
  bool is_mapped_;
  int file_ = -1;
};

}  // namespace megacore::parallel
