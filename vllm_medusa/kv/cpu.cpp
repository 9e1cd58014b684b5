// Compaction of vLLM's paged CPU caches; `kv/cpu.py` calls it.

extern "C" {

struct PackedCaches {  // layers of one layout
  void* const* caches;            // [layers]
  const int64_t* token_offsets;   // [2, block_size], keys and values: elements
  const int64_t* channel_offsets; // [kv_heads, 2, head_size]
  int64_t layers, element_size, block_size, block_stride, kv_heads, head_size;
};

struct Moves {
  const int64_t *slots, *path, *num_accepted;  // [batch, width], [batch, columns], [batch]
  int64_t batch, width, columns;
};
}

namespace {

template <class T> void move_token(const PackedCaches& all, T* cache, int64_t from, int64_t to) {
  const int64_t size = all.block_size;
  T *source = cache + from / size * all.block_stride, *target = cache + to / size * all.block_stride;
  for (int64_t head = 0; head < all.kv_heads; head++)
    for (int64_t half = 0; half < 2; half++) {
      const int64_t* channel = all.channel_offsets + (head * 2 + half) * all.head_size;
      const T* read = source + all.token_offsets[half * size + from % size];
      T* write = target + all.token_offsets[half * size + to % size];
      for (int64_t d = 0; d < all.head_size; d++) write[channel[d]] = read[channel[d]];
    }
}

// The node of depth d has index d or more, so each slot is read before it is overwritten.
template <class T> void compact(const PackedCaches& all, const Moves& moves) {
#pragma omp parallel for if (all.layers > 1)
  for (int64_t layer = 0; layer < all.layers; layer++)
    for (int64_t b = 0; b < moves.batch; b++)
      for (int64_t depth = 1; depth <= moves.num_accepted[b]; depth++) {
        const int64_t* slots = moves.slots + b * moves.width;
        const int64_t node = moves.path[b * moves.columns + depth];
        if (node != depth)
          move_token(all, static_cast<T*>(all.caches[layer]), slots[node], slots[depth]);
      }
}

}  // namespace

extern "C" void compact_packed(const PackedCaches* caches, const Moves* moves) {
  if (caches->element_size == 4) compact<uint32_t>(*caches, *moves);
  else compact<uint16_t>(*caches, *moves);
}
