// EAGLE-3's drafter: a decoder layer over its paged cache, with a beam of `beam.cpp`;
// `proposer/eagle_cpu.py` calls it. Entries of one level are written, then attended to.

extern "C" {

struct Eagle {
  Matrix fc, qkv, out, gate_up, down, lm_head;
  const float *embedding_norm, *state_norm, *mlp_norm, *last_norm;  // [hidden]
  const float* rope;  // [positions, dim]: cosines, then sines
  Embedding embedding;
  const int64_t* token_map;  // [vocab] ids of the target; null: the same ids
  const float* fc_norm;      // [columns of fc]; null: none
  int64_t norm_width;        // each norm before fc is of that many columns
  int64_t hidden, heads, kv_heads, dim, vocab, positions;
  int32_t norm_before_residual, norm_output;
  float eps;
};

struct EagleCache {
  void* data;
  const int64_t* token_offsets;    // [2, block_size], keys and values: elements
  const int64_t* channel_offsets;  // [kv_heads, 2, dim]
  const int32_t* blocks;           // [batch, max_blocks]
  int64_t block_size, block_stride, max_blocks, window;  // window 0: none
  int32_t dtype, paired, truncate;  // as in `Layer`
};

struct EaglePaths {  // accepted tokens of B requests: the rows up to their roots, then nodes
  const int64_t *first, *rows, *computed;  // [batch]: first row, rows up to the root, first position
  const int64_t *nodes, *accepted;         // [batch, columns] with the root, [batch]; null: no nodes
  const int32_t* input_ids;                // of the step's rows
  const int64_t* next_tokens;              // [batch], after the last accepted one
  const void* const* states;               // [count] arrays of the step's rows
  const int64_t* strides;                  // [count], of a row
  float *normed, *hidden;                  // [batch, hidden], at the last accepted token
  int64_t batch, columns, count, width, dtype;  // of the states: number, width, dtype as in `Layer`

  int64_t accepted_rows(int64_t b) const { return rows[b] + (accepted ? accepted[b] : 0); }
  int64_t row(int64_t b, int64_t i) const {  // of the i-th accepted token
    const int64_t root = rows[b] - 1;
    return first[b] + (i <= root ? i : root + nodes[b * columns + i - root]);
  }
};

struct EagleRoots {
  const float *normed, *hidden;  // [batch, hidden]
  const int64_t* ends;           // [batch], exact entries
};
}

namespace {

struct Entries {  // of B requests, request by request
  std::vector<int64_t> first, count, own, base;   // per request, as in `Plan`
  std::vector<int64_t> tokens, positions, slots;  // slots < 0: not stored
  std::vector<uint8_t> mask;                      // [batch, most, width]
  std::vector<int64_t> depths;                    // [batch, width], position after the base
  int64_t most, width;
  std::vector<float> states, normed;  // [entries, hidden]: inputs and then outputs; outputs

  Entries(int64_t batch, int64_t most, int64_t width)
      : first(batch), count(batch), own(batch), base(batch), mask(batch * most * width),
        depths(batch * width), most(most), width(width) {}
};

void rms_norm(const float* x, const float* weight, int64_t size, float eps, float* to) {
  Floats sums = {};
  for (int64_t i = 0; i < size; i += W) sums += load(x + i) * load(x + i);
  const float factor = 1.0f / std::sqrt(sum_of(sums) / size + eps);
  for (int64_t i = 0; i < size; i += W) store(to + i, load(x + i) * factor * load(weight + i));
}

void rotate(float* x, const float* rope, int64_t dim) {
  const int64_t half = dim / 2;
  for (int64_t i = 0; i < half; i++) {
    const float a = x[i], b = x[half + i], cos = rope[i], sin = rope[half + i];
    x[i] = a * cos - b * sin, x[half + i] = b * cos + a * sin;
  }
}

template <class T>
void write_entry(const Eagle& eagle, const EagleCache& cache, int64_t slot, const float* key) {
  const int64_t D = eagle.dim, size = cache.block_size;
  T* block = static_cast<T*>(cache.data) + slot / size * cache.block_stride;
  for (int64_t head = 0; head < eagle.kv_heads; head++)
    for (int64_t half = 0; half < 2; half++) {
      const float* from = key + (half * eagle.kv_heads + head) * D;
      const int64_t* channel = cache.channel_offsets + (head * 2 + half) * D;
      T* to = block + cache.token_offsets[half * size + slot % size];
      for (int64_t d = 0; d < D; d++) write(to + channel[d], from[d], false);
    }
}

template <class T, bool paired>
void run_entries(const Eagle& eagle, const EagleCache& cache, Entries& entries) {
  static thread_local std::vector<float> x, y;
  static thread_local std::vector<T> query, mixed;
  const int64_t H = eagle.hidden, D = eagle.dim, Q = eagle.heads * D;
  const int64_t n = entries.tokens.size();
  x.resize(n * 2 * H);
  for (int64_t r = 0; r < n; r++) {
    float *both = x.data() + r * 2 * H, *state = entries.states.data() + r * H;
    embed(eagle.embedding, entries.tokens[r], H, both + H);
    rms_norm(both + H, eagle.embedding_norm, H, eagle.eps, both);
    rms_norm(state, eagle.state_norm, H, eagle.eps, both + H);
    if (eagle.norm_before_residual) std::copy_n(both + H, H, state);
  }
  multiply(eagle.qkv, x.data(), n, y);
  query.resize(n * Q), mixed.resize(n * Q);
  for (int64_t r = 0; r < n; r++) {
    float* row = y.data() + r * eagle.qkv.rows;
    const float* rope = eagle.rope + std::min(entries.positions[r], eagle.positions - 1) * D;
    for (int64_t head = 0; head < eagle.heads + eagle.kv_heads; head++) rotate(row + head * D, rope, D);
    for (int64_t i = 0; i < Q; i++) write(query.data() + r * Q + i, row[i], false);
    if (entries.slots[r] >= 0) write_entry<T>(eagle, cache, entries.slots[r], row + Q);
  }
  const int64_t batch = entries.count.size();
  const Plan plan{batch, eagle.heads, eagle.kv_heads, D, cache.block_size, cache.block_stride,
                  cache.window, cache.max_blocks, entries.most * entries.width, entries.width,
                  entries.width,
                  entries.first.data(), entries.count.data(), entries.own.data(),
                  entries.base.data(), cache.blocks, entries.mask.data(), entries.depths.data()};
  const Layer layer{query.data(), cache.data, mixed.data(), nullptr, Q, D, Q, D,
                    1.0f / std::sqrt(float(D)), 0.0f, cache.dtype, paired, cache.truncate};
  run<T, paired>(plan, layer);
  x.resize(n * Q);
  for (int64_t i = 0; i < n * Q; i += W) store(x.data() + i, load(mixed.data() + i));
  multiply(eagle.out, x.data(), n, y);
  x.resize(n * H);
  for (int64_t i = 0; i < n * H; i += W) {
    float* state = entries.states.data() + i;
    store(state, load(state) + load(y.data() + i));
  }
  for (int64_t r = 0; r < n; r++)
    rms_norm(entries.states.data() + r * H, eagle.mlp_norm, H, eagle.eps, x.data() + r * H);
  multiply(eagle.gate_up, x.data(), n, y);
  const int64_t inner = eagle.down.columns;
  x.resize(n * inner);
  for (int64_t r = 0; r < n; r++)
    for (int64_t i = 0; i < inner; i += W) {
      const float* gate = y.data() + r * 2 * inner + i;
      store(x.data() + r * inner + i, silu(load(gate)) * load(gate + inner));
    }
  multiply(eagle.down, x.data(), n, y);
  entries.normed.resize(n * H);
  for (int64_t r = 0; r < n; r++) {
    float *state = entries.states.data() + r * H, *normed = entries.normed.data() + r * H;
    for (int64_t i = 0; i < H; i += W) store(state + i, load(state + i) + load(y.data() + r * H + i));
    rms_norm(state, eagle.last_norm, H, eagle.eps, normed);
    if (eagle.norm_output) std::copy_n(normed, H, state);
  }
}

void run_entries(const Eagle& eagle, const EagleCache& cache, Entries& entries) {
  if (cache.dtype == 0) run_entries<float, false>(eagle, cache, entries);
  else if (cache.dtype == 2) run_entries<Float16, false>(eagle, cache, entries);
  else if (cache.paired) run_entries<BFloat16, true>(eagle, cache, entries);
  else run_entries<BFloat16, false>(eagle, cache, entries);
}

template <class T>
void append_states(const EaglePaths& paths, int64_t row, std::vector<float>& to) {
  for (int64_t k = 0; k < paths.count; k++) {
    const T* from = static_cast<const T*>(paths.states[k]) + row * paths.strides[k];
    const int64_t at = to.size();
    to.resize(at + paths.width);
    for (int64_t d = 0; d < paths.width; d += W) store(to.data() + at + d, load(from + d));
  }
}

std::vector<float> rows_of(const std::vector<float>& x, const std::vector<Expanded>& nodes,
                           int64_t size) {
  std::vector<float> found;
  for (const Expanded& node : nodes)
    found.insert(found.end(), x.begin() + node.row * size, x.begin() + (node.row + 1) * size);
  return found;
}

}  // namespace

// The exact entries of accepted tokens.
extern "C" void eagle_prefill(const Eagle* eagle, const EagleCache* cache, const EaglePaths* paths) {
  const int64_t B = paths->batch, H = eagle->hidden, F = paths->count * paths->width;
  const int64_t size = cache->block_size;
  auto append = paths->dtype == 0   ? append_states<float>
                : paths->dtype == 2 ? append_states<Float16>
                                    : append_states<BFloat16>;
  int64_t most = 0;
  for (int64_t b = 0; b < B; b++) most = std::max(most, paths->accepted_rows(b));
  Entries entries(B, most, most);
  std::vector<float> features;
  for (int64_t b = 0; b < B; b++) {
    const int64_t count = paths->accepted_rows(b);
    const int32_t* blocks = cache->blocks + b * cache->max_blocks;
    entries.first[b] = entries.tokens.size(), entries.base[b] = paths->computed[b];
    entries.count[b] = entries.own[b] = count;
    for (int64_t i = 0; i < count; i++) {
      const int64_t position = paths->computed[b] + i;
      const bool is_last = i + 1 == count;
      entries.tokens.push_back(is_last ? paths->next_tokens[b] : paths->input_ids[paths->row(b, i + 1)]);
      entries.positions.push_back(position);
      entries.slots.push_back(blocks[position / size] * size + position % size);
      std::fill_n(entries.mask.data() + (b * most + i) * most, i + 1, 1);
      entries.depths[b * most + i] = i;
      append(*paths, paths->row(b, i), features);
    }
  }
  if (eagle->fc_norm)
    for (int64_t at = 0, size = eagle->norm_width; at < int64_t(features.size()); at += size)
      rms_norm(features.data() + at, eagle->fc_norm + at % F, size, eagle->eps,
               features.data() + at);
  if (eagle->fc.rows) multiply(eagle->fc, features.data(), entries.tokens.size(), entries.states);
  else entries.states = std::move(features);
  run_entries(*eagle, *cache, entries);
  for (int64_t b = 0; b < B; b++) {
    const int64_t row = entries.first[b] + entries.count[b] - 1;
    std::copy_n(entries.normed.data() + row * H, H, paths->normed + b * H);
    std::copy_n(entries.states.data() + row * H, H, paths->hidden + b * H);
  }
}

// Trees of B requests; each entry of a branch is stored after the exact ones, as it is expanded.
// Returns 0 if logits are not finite; the outputs are then undefined.
extern "C" int32_t eagle_trees(const Eagle* heads, const EagleCache* cache, const EagleRoots* roots,
                               const Beam* beam) {
  const Eagle& eagle = *heads;
  const int64_t B = beam->batch, H = eagle.hidden, size = cache->block_size;
  std::vector<float> normed(roots->normed, roots->normed + B * H), logits;
  std::vector<float> states(roots->hidden, roots->hidden + B * H);
  std::vector<std::vector<int64_t>> paths(B);  // branch entries down to each node
  std::vector<int64_t> stored(B);              // branch entries of each request
  std::vector<std::vector<int64_t>> depths(B);  // of those
  return grow(*beam, eagle.token_map, [&](int64_t level, const auto& expanded, Choices& found) {
    states = rows_of(states, expanded, H);
    if (level == 0) {  // an exact entry
      normed = rows_of(normed, expanded, H);
      paths.assign(expanded.size(), {});
    } else {
      std::vector<int64_t> rows(B);
      for (const Expanded& node : expanded) rows[node.request]++;
      int64_t width = 0;
      for (int64_t b = 0; b < B; b++) width = std::max(width, stored[b] + rows[b]);
      Entries entries(B, *std::max_element(rows.begin(), rows.end()), width);
      std::vector<std::vector<int64_t>> below;
      for (const Expanded& node : expanded) {
        const int64_t b = node.request, end = roots->ends[b], place = stored[b]++;
        const int64_t block = cache->blocks[b * cache->max_blocks + (end + place) / size];
        if (entries.count[b] == 0) entries.first[b] = entries.tokens.size();
        entries.base[b] = end, entries.own[b] = stored[b];
        depths[b].push_back(level - 1);
        entries.tokens.push_back(node.token);
        entries.positions.push_back(end - 1 + level);
        entries.slots.push_back(block * size + (end + place) % size);
        below.push_back(paths[node.row]);
        below.back().push_back(place);
        uint8_t* mask = entries.mask.data() + (b * entries.most + entries.count[b]++) * width;
        for (int64_t each : below.back()) mask[each] = 1;
      }
      for (int64_t b = 0; b < B; b++)
        std::copy(depths[b].begin(), depths[b].end(), entries.depths.begin() + b * width);
      std::swap(entries.states, states), std::swap(paths, below);
      run_entries(eagle, *cache, entries);
      std::swap(entries.states, states), std::swap(normed, entries.normed);
    }
    multiply(eagle.lm_head, normed.data(), expanded.size(), logits);
    return choose(*beam, level, expanded, logits.data(), eagle.vocab, eagle.lm_head.rows, 1.0f,
                  found);
  });
}
