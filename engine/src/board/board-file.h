// A board's file in shared memory: made whole and locked before it gets its name, never two of one name, removed at the end.
//
// A lock on the open file (F_OFD_SETLK) is the sign of life: the kernel drops it when the process ends, however it ends,
// and it tells the truth across PID namespaces, where process numbers do not.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

struct spac_board_file {
    // fills the new file with `size` bytes at `content` before anybody can see it; throws SPAC_STATUS_BOARD
    // describe: who has a file's name, for the error message, given its open descriptor
    spac_board_file(const std::string & name, const void * content, size_t size, const std::function<std::string(int)> & describe);
    ~spac_board_file(); // removes the name, if it is still this file's

    spac_board_file(const spac_board_file &) = delete;

    bool read(size_t offset, void * to, size_t size) const;    // false: the file is shorter
    bool write(size_t offset, const void * from, size_t size); // false: no memory; said once
    bool is_whole() const;                                     // false: somebody truncated or extended it
    bool resize();                                             // to its size again, where memory is left for it

    // of any board, running or left behind; the caller closes it; throws if there is none, or it is no plain file of this user
    static int open(const std::string & name, int flags);
    // whether the engine that made it still has it
    static bool is_locked(int fd);
    // a running engine's stays
    static void remove_left_behind(const std::string & name);

  private:
    const std::string path;
    const size_t      size;
    int               fd        = -1;
    bool              has_erred = false; // said once
};
