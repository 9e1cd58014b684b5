// Trees of a step on the host; `scorer/cpu.py` calls it.

// parents [batch, width], each before its children, -1 for a root; ancestors [batch, width, width],
// self included; bits [batch, width, words], the same packed; depths [batch, width]. Returns the max
// depth of the first num_nodes [batch].
extern "C" int64_t tree_topologies(const int64_t* parents, const int64_t* num_nodes, int64_t batch,
                                   int64_t width, int64_t words, uint8_t* ancestors, uint64_t* bits,
                                   int64_t* depths) {
  int64_t deepest = 0;
  for (int64_t b = 0; b < batch; b++)
    for (int64_t i = 0, first = b * width; i < width; i++) {
      const int64_t parent = parents[first + i], above = first + parent;
      uint8_t* row = ancestors + (first + i) * width;
      uint64_t* packed = bits + (first + i) * words;
      if (parent < 0) std::fill_n(row, width, 0), std::fill_n(packed, words, 0);
      else std::copy_n(ancestors + above * width, width, row),
           std::copy_n(bits + above * words, words, packed);
      row[i] = 1;
      packed[i / 64] |= uint64_t(1) << i % 64;
      depths[first + i] = parent < 0 ? 0 : depths[above] + 1;
      if (i < num_nodes[b]) deepest = std::max(deepest, depths[first + i]);
    }
  return deepest;
}

// A node's position is its request's base plus its depth; a request's nodes start at first_row.
extern "C" void tree_positions(int64_t* positions, const int64_t* base, const int64_t* first_row,
                               const int64_t* num_nodes, int64_t batch, int64_t width,
                               const int64_t* depths) {
  for (int64_t b = 0; b < batch; b++)
    for (int64_t i = 0; i < num_nodes[b]; i++)
      positions[first_row[b] + i] = base[b] + depths[b * width + i];
}
