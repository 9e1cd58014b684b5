// Hydra heads and their beam: trees of B requests in one call; `proposer/hydra.py` calls it.
//
// What `build.of_beam` with `steps.HydraStep` computes. Weights are fp32, or int8 with a factor for
// each row: drafting reads every weight for a few rows, so its time is that of reading them.

extern "C" {

struct Matrix {
  const void* weight;  // [rows, columns], rows a multiple of 4, columns of 16
  const float* scale;  // [rows], of int8 weights; null: fp32
  const float* bias;   // [rows]
  int64_t rows, columns;
};

struct Hydra {
  const Matrix* first;      // [levels]: skip connection, then layer: 2 * hidden rows
  const Matrix* layers;     // [levels, num_layers], residual
  const Matrix* lm_heads;   // [levels]
  const void* embedding;    // the target's
  const int64_t* token_map; // [vocab] ids of the target; null: the same ids
  const float* sharpness;   // [levels], factors on the logits
  int64_t hidden, num_layers, vocab, embedding_dtype, embedding_stride;
  float soft_cap;           // 0: none
};

struct HydraCall {
  const float* states;       // [batch, hidden]
  const int64_t* root;       // [batch]
  const int64_t* max_depth;  // [batch]
  int64_t batch, width, choices, depth, limit, num_nodes;  // beam; useful drafts; nodes to return
  const float* gumbel;       // [batch, noise_levels, vocab], see `noise.py`; null: none
  const float *logit_scale, *noise_scale;  // [batch]
  int64_t noise_levels;
  int64_t *token_ids, *parents;  // [batch, num_nodes]
  float* log_survival;           // [batch, num_nodes]
};
}

namespace {

constexpr int OUT = 4, IN = 4;  // rows of the matrix, rows of the input per tile

inline Floats load(const int8_t* from) {
#ifdef __AVX512F__
  return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_as<__m128i>(from)));
#else
  return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#endif
}

inline float sum_of(Floats x) {
#ifdef __AVX512F__
  return _mm512_reduce_add_ps((__m512)x);
#else
  float total = 0;
  for (int k = 0; k < W; k++) total += x[k];
  return total;
#endif
}

template <int R, class Weight>
void tile(const Matrix& matrix, const float* x, int64_t out, float* y) {
  const Weight* weight = static_cast<const Weight*>(matrix.weight) + out * matrix.columns;
  Floats sums[OUT][R] = {};
  for (int64_t i = 0; i < matrix.columns; i += W) {
    Floats in[R];
    for (int r = 0; r < R; r++) in[r] = load(x + r * matrix.columns + i);
    for (int o = 0; o < OUT; o++) {
      const Floats w = load(weight + o * matrix.columns + i);
      for (int r = 0; r < R; r++) sums[o][r] += w * in[r];
    }
  }
  for (int o = 0; o < OUT; o++) {
    const float scale = matrix.scale ? matrix.scale[out + o] : 1.0f;
    for (int r = 0; r < R; r++)
      y[r * matrix.rows + out + o] = sum_of(sums[o][r]) * scale + matrix.bias[out + o];
  }
}

template <class Weight>
void product(const Matrix& matrix, const float* x, int64_t count, float* y) {
#pragma omp parallel for schedule(static)
  for (int64_t out = 0; out < matrix.rows; out += OUT) {
    int64_t r = 0;
    for (; r + IN <= count; r += IN)
      tile<IN, Weight>(matrix, x + r * matrix.columns, out, y + r * matrix.rows);
    const float* rest = x + r * matrix.columns;
    if (count - r == 1) tile<1, Weight>(matrix, rest, out, y + r * matrix.rows);
    if (count - r == 2) tile<2, Weight>(matrix, rest, out, y + r * matrix.rows);
    if (count - r == 3) tile<3, Weight>(matrix, rest, out, y + r * matrix.rows);
  }
}

// [count, columns] -> [count, rows]
void multiply(const Matrix& matrix, const float* x, int64_t count, std::vector<float>& y) {
  y.resize(count * matrix.rows);
  if (matrix.scale) product<int8_t>(matrix, x, count, y.data());
  else product<float>(matrix, x, count, y.data());
}

inline Floats silu(Floats x) { return x / (1.0f + exponential(-x)); }

template <class T> void embed(const Hydra& hydra, int64_t token, float* to) {
  const T* row = static_cast<const T*>(hydra.embedding) + token * hydra.embedding_stride;
  for (int64_t i = 0; i < hydra.hidden; i += W) store(to + i, load(row + i));
}

struct Node {
  int64_t token, parent;  // parent: its place among the request's candidates
  float value;
};

struct Expanded {
  int64_t request, node;  // its place among the request's candidates
  int64_t row;            // of what was seen above it
};

// Hidden state and embeddings down to each node [nodes, (level + 2) * hidden] -> best choices.
bool choose(const Hydra& hydra, const HydraCall& call, int64_t level,
            const std::vector<float>& seen, const std::vector<Expanded>& expanded,
            std::vector<int64_t>& ids, std::vector<float>& confidence) {
  static thread_local std::vector<float> both, x, y, logits;
  const int64_t H = hydra.hidden, count = expanded.size(), width = call.choices;
  multiply(hydra.first[level], seen.data(), count, both);
  x.resize(count * H);
  for (int64_t r = 0; r < count; r++)
    for (int64_t i = 0; i < H; i += W) {
      const float* row = both.data() + r * 2 * H + i;
      store(x.data() + r * H + i, load(row) + silu(load(row + H)));
    }
  for (int64_t layer = 0; layer < hydra.num_layers; layer++) {
    multiply(hydra.layers[level * hydra.num_layers + layer], x.data(), count, y);
    for (int64_t i = 0; i < count * H; i += W)
      store(x.data() + i, load(x.data() + i) + silu(load(y.data() + i)));
  }
  const Matrix& lm_head = hydra.lm_heads[level];
  multiply(lm_head, x.data(), count, logits);
  if (hydra.soft_cap > 0)
    for (float& logit : logits) logit = hydra.soft_cap * std::tanh(logit / hydra.soft_cap);
  const float one = 1.0f, *factor = hydra.sharpness + level;
  if (call.gumbel) {
    for (int64_t r = 0; r < count; r++) {
      const int64_t b = expanded[r].request;
      const float scale = *factor * call.logit_scale[b], weight = call.noise_scale[b];
      const float* noise = call.gumbel + (b * call.noise_levels + level) * hydra.vocab;
      float* row = logits.data() + r * lm_head.rows;
      for (int64_t i = 0; i < hydra.vocab; i++) row[i] = row[i] * scale + noise[i] * weight;
    }
    factor = &one;
  }
  ids.resize(count * width), confidence.resize(count * width);
  return best_of_rows(logits.data(), count, hydra.vocab, lm_head.rows, factor, 1, width,
                      ids.data(), confidence.data());
}

// Places of the largest values, best first, equal ones in order.
std::vector<int64_t> ranked(const Node* nodes, int64_t count, int64_t most) {
  std::vector<int64_t> order(count);
  for (int64_t i = 0; i < count; i++) order[i] = i;
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return nodes[a].value > nodes[b].value; });
  order.resize(std::min(count, most));
  return order;
}

}  // namespace

// Returns 0 where logits are not finite: nothing is promised then.
extern "C" int32_t hydra_trees(const Hydra* heads, const HydraCall* call) {
  const Hydra& hydra = *heads;
  const int64_t B = call->batch, H = hydra.hidden;
  std::vector<std::vector<Node>> nodes(B);
  std::vector<Expanded> expanded(B);
  static thread_local std::vector<float> seen, above;  // [nodes, (level + 1) * H]
  static thread_local std::vector<int64_t> ids;
  static thread_local std::vector<float> confidence;
  above.assign(call->states, call->states + B * H);
  for (int64_t b = 0; b < B; b++) {
    nodes[b].push_back({call->root[b], -1, 0.0f});
    expanded[b] = {b, 0, b};
  }
  for (int64_t level = 0; level < call->depth && !expanded.empty(); level++) {
    const int64_t count = expanded.size(), old = (level + 1) * H, width = old + H;
    seen.resize(count * width);
    for (int64_t r = 0; r < count; r++) {
      float* row = seen.data() + r * width;
      std::copy_n(above.data() + expanded[r].row * old, old, row);
      const int64_t token = nodes[expanded[r].request][expanded[r].node].token;
      if (hydra.embedding_dtype == 0) embed<float>(hydra, token, row + old);
      else if (hydra.embedding_dtype == 1) embed<BFloat16>(hydra, token, row + old);
      else embed<Float16>(hydra, token, row + old);
    }
    if (!choose(hydra, *call, level, seen, expanded, ids, confidence)) return 0;
    std::vector<int64_t> first(B);  // candidates of the levels above
    for (int64_t b = 0; b < B; b++) first[b] = nodes[b].size();
    std::vector<std::vector<int64_t>> rows(B);
    for (int64_t r = 0; r < count; r++) {
      const int64_t b = expanded[r].request;
      const float value = nodes[b][expanded[r].node].value;
      for (int64_t i = r * call->choices; i < (r + 1) * call->choices; i++) {
        const int64_t token = hydra.token_map ? hydra.token_map[ids[i]] : ids[i];
        const bool useful = call->max_depth[b] > level;
        nodes[b].push_back({token, expanded[r].node, useful ? value + confidence[i] : -INFINITY});
        rows[b].push_back(r);
      }
    }
    expanded.clear();
    for (int64_t b = 0; b < B && level + 1 < call->depth; b++) {
      if (call->max_depth[b] <= level + 1) continue;
      // No child is above its parent, nor above what was created before and has its value.
      const int64_t all = nodes[b].size();
      float last = -INFINITY;  // of the best drafts so far
      if (all > call->limit) last = nodes[b][ranked(nodes[b].data(), all, all)[call->limit]].value;
      for (int64_t i : ranked(nodes[b].data() + first[b], all - first[b], call->width))
        if (nodes[b][first[b] + i].value > last) expanded.push_back({b, first[b] + i, rows[b][i]});
    }
    std::swap(seen, above);
  }
  for (int64_t b = 0; b < B; b++) {
    const std::vector<int64_t> order = ranked(nodes[b].data(), nodes[b].size(), call->num_nodes);
    std::vector<int64_t> place(nodes[b].size());
    for (int64_t i = 0; i < call->num_nodes; i++) {
      const int64_t at = b * call->num_nodes + i;
      const bool exists = i < int64_t(order.size());
      const Node node = exists ? nodes[b][order[i]] : Node{0, 0, -INFINITY};
      if (exists) place[order[i]] = i;
      call->token_ids[at] = node.token;
      call->parents[at] = node.parent < 0 ? -1 : exists ? place[node.parent] : 0;
      call->log_survival[at] = node.value;
    }
  }
  return 1;
}
