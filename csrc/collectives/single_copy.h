// Reductions, and the end of moves, in which ranks read each other's memory (peer_memory.h).
//
//   all_reduce       each rank reads its share of the elements from every peer, block by block into
//                    a private buffer that stays in the cache, reduces it into its output, and reads
//                    the peers' finished shares from their outputs: two rounds more
//   reduce_scatter   each rank reads its part from every peer: one round more
//
// The last round says that all have read. Where some rank could not read some memory, all of them
// learn it in that round, and move what lacks through the outboxes.
#pragma once

#include "collectives/routes.h"

namespace tilework {

/// Reduce `bytes` bytes at sources() of ranks from `begin` to before `end` into `to`, block by block; -1: all.
void reduce_blocks(Exchange& x, char* to, size_t bytes, int begin = 0, int end = -1);

/// A long all_reduce or reduce through the outboxes. `output` is null on ranks that do not want it.
void reduce_chunked(Exchange& x, const Buffer& input, char* output);

/// A round in which each rank says whether it has read what it needed; true if all have.
bool all_read(Exchange& x, bool done);

/// Show an all_reduce's buffers to peers, in the coming round.
void show_reduction(const Exchange& x, const Buffer& input, char* output);
/// Finish an all_reduce whose buffers all ranks have shown.
void all_reduce_by_reading(Exchange& x, const Buffer& input, char* output);

/// Finish a reduce_scatter whose buffers all ranks have shown; false if some rank could not. Of this
/// rank's result, `done` bytes are there then.
bool reduce_scatter_by_reading(Exchange& x, const Routes& routes, size_t& done);

}  // namespace tilework
