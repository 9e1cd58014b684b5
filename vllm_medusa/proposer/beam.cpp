// Beams of drafters with weights of their own: trees of B requests in one call. `hydra.cpp` and
// `eagle.cpp` score the nodes; `proposer/beam.py` has the structures.
//
// What `build.of_beam` computes. Weights are fp32, or bytes with a factor for each row.

extern "C" {

struct Matrix {
  const void* weight;  // fp32 [rows, columns], or bytes, see `blocks`: rows a multiple of 16
  const float* scale;  // [rows], of bytes; null: fp32
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

constexpr int OUT = 4, IN = 4;  // rows of an fp32 matrix, rows of the input per tile

inline float sum_of(Floats x) {
#ifdef __AVX512F__
  return _mm512_reduce_add_ps((__m512)x);
#else
  float total = 0;
  for (int k = 0; k < W; k++) total += x[k];
  return total;
#endif
}

template <int R> void tile(const Matrix& matrix, const float* x, int64_t out, float* y) {
  const float* weight = static_cast<const float*>(matrix.weight) + out * matrix.columns;
  Floats sums[OUT][R] = {};
  for (int64_t i = 0; i < matrix.columns; i += W) {
    Floats in[R];
    for (int r = 0; r < R; r++) in[r] = load(x + r * matrix.columns + i);
    for (int o = 0; o < OUT; o++) {
      const Floats w = load(weight + o * matrix.columns + i);
      for (int r = 0; r < R; r++) sums[o][r] += w * in[r];
    }
  }
  for (int o = 0; o < OUT; o++)
    for (int r = 0; r < R; r++)
      y[r * matrix.rows + out + o] = sum_of(sums[o][r]) + matrix.bias[out + o];
}

void multiply_floats(const Matrix& matrix, const float* x, int64_t count, float* y) {
#pragma omp parallel for schedule(static)
  for (int64_t out = 0; out < matrix.rows; out += OUT) {
    int64_t r = 0;
    for (; r + IN <= count; r += IN)
      tile<IN>(matrix, x + r * matrix.columns, out, y + r * matrix.rows);
    const float* rest = x + r * matrix.columns;
    if (count - r == 1) tile<1>(matrix, rest, out, y + r * matrix.rows);
    if (count - r == 2) tile<2>(matrix, rest, out, y + r * matrix.rows);
    if (count - r == 3) tile<3>(matrix, rest, out, y + r * matrix.rows);
  }
}

// Bytes are weight + 128, in blocks of 16 rows and 64 columns: 16 groups of 4 columns, each with the
// bytes of all rows, [rows / 16, columns / 64, 16, 16, 4]; columns are padded with 128.
typedef int32_t Sums __attribute__((vector_size(64)));  // one per row of a block

#ifdef __AVX512VNNI__
// Inputs as integers of 15 bits, 128 * high + low, of which each product takes 8.
struct Quantized {
  int64_t size = 0;                    // columns, padded
  Aligned<int8_t> high, low;           // [rows, size], rows padded to 16
  std::vector<int32_t> highs, lows;    // [rows], 128 * sums
  std::vector<float> scale;            // [rows]

  void assign(const float* x, int64_t count, int64_t columns) {
    const int64_t rows = (count + 15) / 16 * 16;
    size = (columns + 63) / 64 * 64;
    high.resize(rows * size), low.resize(rows * size);
    highs.resize(rows), lows.resize(rows), scale.resize(rows);
    for (int64_t r = 0; r < count; r++) {
      Floats most = {}, invalid = {};  // NaN where an input is not finite
      for (int64_t i = 0; i < columns; i += W) {
        const Floats value = load(x + r * columns + i), size = value < 0.0f ? -value : value;
        most = size > most ? size : most;
        invalid += value * 0.0f;
      }
      const float largest = std::max(_mm512_reduce_max_ps((__m512)most), 1e-30f);
      const float factor = 127 * 128 / largest;
      __m512i sums[2] = {};
      for (int64_t i = 0; i < columns; i += W) {
        const __m512i all = _mm512_cvtps_epi32((__m512)(load(x + r * columns + i) * factor));
        const __m512i above = _mm512_srai_epi32(_mm512_add_epi32(all, _mm512_set1_epi32(64)), 7);
        const __m512i below = _mm512_sub_epi32(all, _mm512_slli_epi32(above, 7));
        sums[0] = _mm512_add_epi32(sums[0], above), sums[1] = _mm512_add_epi32(sums[1], below);
        const __m128i parts[2] = {_mm512_cvtepi32_epi8(above), _mm512_cvtepi32_epi8(below)};
        std::memcpy(high.data() + r * size + i, parts, 16);
        std::memcpy(low.data() + r * size + i, parts + 1, 16);
      }
      for (auto* each : {&high, &low})
        std::fill(each->data() + r * size + columns, each->data() + (r + 1) * size, 0);
      highs[r] = 128 * _mm512_reduce_add_epi32(sums[0]);
      lows[r] = 128 * _mm512_reduce_add_epi32(sums[1]);
      scale[r] = largest / (127 * 128) + _mm512_reduce_add_ps((__m512)invalid);
    }
  }
};

void write_sums(const Matrix& matrix, const Quantized& x, int64_t r, int64_t out, Sums high, Sums low,
                float* y) {
  const Floats sums = __builtin_convertvector(high - x.highs[r], Floats) * 128.0f +
                      __builtin_convertvector(low - x.lows[r], Floats);
  store(y + r * matrix.rows + out,
        sums * x.scale[r] * load(matrix.scale + out) + load(matrix.bias + out));
}

#ifdef __AMX_INT8__
void multiply_tiles(const Matrix& matrix, const Quantized& x, int64_t count, int64_t out, float* y) {
  const uint8_t* weight = static_cast<const uint8_t*>(matrix.weight) + out * x.size;
  Sums high[16], low[16];
  for (int64_t r = 0; r < count; r += 16) {
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t i = 0; i < x.size; i += 64) {
      _tile_loadd(2, x.high.data() + r * x.size + i, x.size);
      _tile_loadd(3, x.low.data() + r * x.size + i, x.size);
      _tile_loadd(4, weight + i * 16, 64);
      _tile_dpbsud(0, 2, 4);
      _tile_dpbsud(1, 3, 4);
    }
    _tile_stored(0, high, 64);
    _tile_stored(1, low, 64);
    for (int64_t k = 0; k < std::min(count - r, int64_t(16)); k++)
      write_sums(matrix, x, r + k, out, high[k], low[k], y);
  }
}
#endif

template <int R>
void multiply_rows(const Matrix& matrix, const Quantized& x, int64_t r, int64_t count, int64_t out,
                   float* y) {
  const uint8_t* weight = static_cast<const uint8_t*>(matrix.weight) + out * x.size;
  __m512i high[R] = {}, low[R] = {};
  for (int64_t i = 0; i < x.size; i += 4) {
    const __m512i w = load_as<__m512i>(weight + i * 16);
    for (int k = 0; k < R; k++) {
      const int64_t at = (r + k) * x.size + i;
      high[k] = _mm512_dpbusd_epi32(high[k], w, _mm512_set1_epi32(load_as<int32_t>(x.high.data() + at)));
      low[k] = _mm512_dpbusd_epi32(low[k], w, _mm512_set1_epi32(load_as<int32_t>(x.low.data() + at)));
    }
  }
  for (int k = 0; k < R && r + k < count; k++)
    write_sums(matrix, x, r + k, out, (Sums)high[k], (Sums)low[k], y);
}

void multiply_block(const Matrix& matrix, const Quantized& x, int64_t count, int64_t out, float* y) {
#ifdef __AMX_INT8__
  if (tiles_allowed() && count > 4) return multiply_tiles(matrix, x, count, out, y);
#endif
  for (int64_t r = 0; r < count; r += 8) {  // sums of rows from `count` on are not used
    const int64_t rest = count - r;
    if (rest == 1) multiply_rows<1>(matrix, x, r, count, out, y);
    else if (rest == 2) multiply_rows<2>(matrix, x, r, count, out, y);
    else if (rest <= 4) multiply_rows<4>(matrix, x, r, count, out, y);
    else multiply_rows<8>(matrix, x, r, count, out, y);
  }
}

void multiply_bytes(const Matrix& matrix, const float* input, int64_t count, float* y) {
  static thread_local Quantized kept;  // keeps its memory
  kept.assign(input, count, matrix.columns);
  const Quantized& x = kept;  // the caller's, for all threads
#pragma omp parallel
  {
    [[maybe_unused]] const Tiles tiles;
#pragma omp for schedule(static)
    for (int64_t out = 0; out < matrix.rows; out += 16) multiply_block(matrix, x, count, out, y);
  }
}
#else
template <int R>
void multiply_rows(const Matrix& matrix, const float* x, int64_t out, float* y) {
  const int64_t size = (matrix.columns + 63) / 64 * 64;
  const uint8_t* weight = static_cast<const uint8_t*>(matrix.weight) + out * size;
  typedef float Wide __attribute__((vector_size(64)));
  Wide sums[R] = {};
  for (int64_t i = 0; i < matrix.columns; i += 4) {
    const Sums bytes = load_as<Sums>(weight + i * 16);
    for (int k = 0; k < 4; k++) {
      const Wide w = __builtin_convertvector((bytes >> 8 * k & 255) - 128, Wide);
      for (int r = 0; r < R; r++) sums[r] += w * x[r * matrix.columns + i + k];
    }
  }
  for (int r = 0; r < R; r++)
    for (int o = 0; o < 16; o++)
      y[r * matrix.rows + out + o] = sums[r][o] * matrix.scale[out + o] + matrix.bias[out + o];
}

void multiply_bytes(const Matrix& matrix, const float* x, int64_t count, float* y) {
#pragma omp parallel for schedule(static)
  for (int64_t out = 0; out < matrix.rows; out += 16) {
    int64_t r = 0;
    for (; r + 4 <= count; r += 4)
      multiply_rows<4>(matrix, x + r * matrix.columns, out, y + r * matrix.rows);
    for (; r < count; r++)
      multiply_rows<1>(matrix, x + r * matrix.columns, out, y + r * matrix.rows);
  }
}
#endif

// [count, columns] -> [count, rows]
void multiply(const Matrix& matrix, const float* x, int64_t count, std::vector<float>& y) {
  y.resize(count * matrix.rows);
  if (matrix.scale) multiply_bytes(matrix, x, count, y.data());
  else multiply_floats(matrix, x, count, y.data());
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
#pragma omp parallel for schedule(static) if (count > 1)
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

// `score` (level, expanded, choices) -> bool writes the choices below the expanded nodes. If it
// returns false, so does `grow`, and the outputs are undefined.
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
