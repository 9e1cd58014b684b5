// Beams of drafters with weights of their own: trees of B requests in one call. `hydra.cpp` and
// `eagle.cpp` score the nodes; `proposer/beam.py` has the structures.
//
// What `build.of_beam` computes. Weights are fp32, or int8 with a factor for each row: drafting
// reads every weight for a few rows, so its time is that of reading them.

extern "C" {

struct Matrix {
  const void* weight;  // [rows, columns], rows a multiple of 4, columns of 16
  const float* scale;  // [rows], of int8 weights; null: fp32
  const float* bias;   // [rows]
  int64_t rows, columns;
};

struct Embedding {  // the target's
  const void* weight;
  int64_t dtype, stride;
};

struct Beam {
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

template <class T> void embed_as(const Embedding& from, int64_t token, int64_t hidden, float* to) {
  const T* row = static_cast<const T*>(from.weight) + token * from.stride;
  for (int64_t i = 0; i < hidden; i += W) store(to + i, load(row + i));
}

void embed(const Embedding& from, int64_t token, int64_t hidden, float* to) {
  if (from.dtype == 0) embed_as<float>(from, token, hidden, to);
  else if (from.dtype == 1) embed_as<BFloat16>(from, token, hidden, to);
  else embed_as<Float16>(from, token, hidden, to);
}

struct Node {
  int64_t token, parent;  // parent: its place among the request's candidates
  float value;
};

struct Expanded {
  int64_t request, node;  // its place among the request's candidates
  int64_t row;            // of its parent among the nodes expanded before
  int64_t token;
};

struct Choices {  // [nodes, beam.choices], best first
  std::vector<int64_t> ids;
  std::vector<float> confidence;
};

// The best choices after logits [nodes, stride], which are changed; false: they are not finite.
bool choose(const Beam& beam, int64_t level, const std::vector<Expanded>& expanded, float* logits,
            int64_t vocab, int64_t stride, float factor, Choices& found) {
  const int64_t count = expanded.size();
  if (beam.gumbel) {
    for (int64_t r = 0; r < count; r++) {
      const int64_t b = expanded[r].request;
      const float scale = factor * beam.logit_scale[b], weight = beam.noise_scale[b];
      const float* noise = beam.gumbel + (b * beam.noise_levels + level) * vocab;
      float* row = logits + r * stride;
      for (int64_t i = 0; i < vocab; i++) row[i] = row[i] * scale + noise[i] * weight;
    }
    factor = 1.0f;
  }
  found.ids.resize(count * beam.choices), found.confidence.resize(count * beam.choices);
  return best_of_rows(logits, count, vocab, stride, &factor, 1, beam.choices, found.ids.data(),
                      found.confidence.data());
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

// `score` (level, expanded, choices) -> bool gives the choices below the expanded nodes; false: no
// trees, and nothing is promised.
template <class Score>
bool grow(const Beam& beam, const int64_t* token_map, const Score& score) {
  const int64_t B = beam.batch;
  std::vector<std::vector<Node>> nodes(B);
  std::vector<Expanded> expanded;
  Choices found;
  for (int64_t b = 0; b < B; b++) {
    nodes[b].push_back({beam.root[b], -1, 0.0f});
    if (beam.max_depth[b] > 0) expanded.push_back({b, 0, b, beam.root[b]});
  }
  for (int64_t level = 0; level < beam.depth && !expanded.empty(); level++) {
    if (!score(level, expanded, found)) return false;
    std::vector<int64_t> first(B);  // candidates of the levels above
    for (int64_t b = 0; b < B; b++) first[b] = nodes[b].size();
    std::vector<std::vector<int64_t>> rows(B);
    for (int64_t r = 0; r < int64_t(expanded.size()); r++) {
      const int64_t b = expanded[r].request;
      const float value = nodes[b][expanded[r].node].value;
      for (int64_t i = r * beam.choices; i < (r + 1) * beam.choices; i++) {
        const int64_t token = token_map ? token_map[found.ids[i]] : found.ids[i];
        nodes[b].push_back({token, expanded[r].node, value + found.confidence[i]});
        rows[b].push_back(r);
      }
    }
    expanded.clear();
    for (int64_t b = 0; b < B && level + 1 < beam.depth; b++) {
      if (beam.max_depth[b] <= level + 1) continue;
      // No child is above its parent, nor above what was created before and has its value.
      const int64_t all = nodes[b].size();
      float last = -INFINITY;  // of the best drafts so far
      if (all > beam.limit) last = nodes[b][ranked(nodes[b].data(), all, all)[beam.limit]].value;
      for (int64_t i : ranked(nodes[b].data() + first[b], all - first[b], beam.width)) {
        const Node& node = nodes[b][first[b] + i];
        if (node.value > last) expanded.push_back({b, first[b] + i, rows[b][i], node.token});
      }
    }
  }
  for (int64_t b = 0; b < B; b++) {
    const std::vector<int64_t> order = ranked(nodes[b].data(), nodes[b].size(), beam.num_nodes);
    std::vector<int64_t> place(nodes[b].size());
    for (int64_t i = 0; i < beam.num_nodes; i++) {
      const int64_t at = b * beam.num_nodes + i;
      const bool exists = i < int64_t(order.size());
      const Node node = exists ? nodes[b][order[i]] : Node{0, 0, -INFINITY};
      if (exists) place[order[i]] = i;
      beam.token_ids[at] = node.token;
      beam.parents[at] = node.parent < 0 ? -1 : exists ? place[node.parent] : 0;
      beam.log_survival[at] = node.value;
    }
  }
  return true;
}

}  // namespace
