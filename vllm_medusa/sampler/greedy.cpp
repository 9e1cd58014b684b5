// Greedy verification: descends each request's tree while the argmax is a child's token.
// `sampler/greedy.py` calls it.

namespace {

// The first of the largest values, as torch's argmax: a NaN is the largest.
template <class T> int64_t argmax(const T* row, int64_t vocab) {
  Floats most = Floats{} - INFINITY;
  Ints nan = {};
  const int64_t whole = vocab / W * W;
  for (int64_t i = 0; i < whole; i += W) {
    const Floats x = load(row + i);
    nan |= x != x;
    most = x > most ? x : most;
  }
  const Floats rest = load_some(row + whole, vocab - whole);
  nan |= rest != rest;
  most = rest > most ? rest : most;
  const bool is_nan = any(nan);
  float best = -INFINITY;
  for (int k = 0; k < W; k++) best = std::max(best, most[k]);
  for (int64_t i = 0; i < whole; i += W) {
    const Floats x = load(row + i);
    const uint32_t lanes = is_nan ? any(x != x) : any(x == best);
    if (lanes) return i + __builtin_ctz(lanes);
  }
  const uint32_t lanes = is_nan ? any(rest != rest) : any(rest == best);
  return whole + __builtin_ctz(lanes | 1u << (W - 1));
}

template <class T>
void walk(const T* logits, int64_t vocab, int64_t stride, const int64_t* first_row,
          const int64_t* num_nodes, int64_t batch, int64_t width, const int64_t* parents,
          const int64_t* token_ids, int64_t columns, int64_t* path, int64_t* output,
          int64_t* num_accepted, int64_t* last_node) {
#pragma omp parallel for if (batch > 1)
  for (int64_t b = 0; b < batch; b++) {
    const int64_t *parent = parents + b * width, *token = token_ids + b * width;
    int64_t node = 0, depth = 0;
    for (;; depth++) {
      path[b * columns + depth] = node;
      const int64_t next = argmax(logits + (first_row[b] + node) * stride, vocab);
      output[b * columns + depth] = next;
      int64_t child = node + 1;
      while (child < num_nodes[b] && (parent[child] != node || token[child] != next)) child++;
      if (child >= num_nodes[b]) break;
      node = child;
    }
    num_accepted[b] = depth;
    last_node[b] = node;
    std::fill(path + b * columns + depth, path + (b + 1) * columns, node);
    std::fill(output + b * columns + depth + 1, output + (b + 1) * columns, -1);
  }
}

}  // namespace

// logits [rows, vocab], a request's nodes from first_row on; parents and token_ids [batch, width];
// path and output [batch, columns], columns above every depth; num_accepted and last_node [batch].
extern "C" void greedy_walk(const void* logits, int32_t dtype, int64_t vocab, int64_t stride,
                            const int64_t* first_row, const int64_t* num_nodes, int64_t batch,
                            int64_t width, const int64_t* parents, const int64_t* token_ids,
                            int64_t columns, int64_t* path, int64_t* output,
                            int64_t* num_accepted, int64_t* last_node) {
  const auto run = [&](auto* typed) {
    walk(typed, vocab, stride, first_row, num_nodes, batch, width, parents, token_ids, columns,
         path, output, num_accepted, last_node);
  };
  if (dtype == 0) return run(static_cast<const float*>(logits));
  if (dtype == 1) return run(static_cast<const BFloat16*>(logits));
  run(static_cast<const Float16*>(logits));
}
