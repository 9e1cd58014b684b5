// Tree attention over vLLM's paged CPU cache; `scorer/cpu.py` calls it, `kernels.py` compiles it.
//
// A work item is some query rows of one request and key head, and a part of its keys: logits of all
// of them in fp32, a softmax, a weighted sum of values (with AMX of weights in bf16). vLLM's own
// kernels do the same. Its rows are multiplied in tiles of 8 (16 with AMX), and a chunk of keys stays
// in the cache for all tiles. Parts are merged afterwards by their sums of exponentials.
extern "C" {

struct Plan {
  int64_t requests, heads, kv_heads, dim, block_size, block_stride;  // strides in elements
  int64_t window;                                                    // 0: none
  int64_t max_blocks, mask_request, mask_row, depths_request;        // strides
  const int64_t* row;       // [requests] first query row
  const int64_t* rows;      // [requests] query rows
  const int64_t* own;       // [requests] keys after the context
  const int64_t* base;      // [requests] keys of the context
  const int32_t* blocks;    // [requests, max_blocks]
  const uint8_t* mask;      // [requests, rows, own keys]
  const int64_t* depths;    // [requests, own keys], for windows; the queries are the last
};

struct Layer {
  const void *query, *cache;
  void* out;
  const float* sinks;  // [heads] or null
  int64_t query_row, query_head, out_row, out_head;  // strides in elements
  float scale, softcap;
  int32_t dtype;             // 0 fp32, 1 bf16, 2 fp16
  int32_t paired;            // the layout for AMX tiles; vLLM's kernel rounds weights to bf16
  int32_t truncate;          // truncate bf16 results instead of rounding
};
}

namespace {

struct Item {
  int64_t request, head, first, count, part, parts, lo, hi;  // query rows, keys [lo, hi)
  int64_t partial;  // where its sums are kept if there are several parts
};

struct Scratch {  // of a tile with R rows
  float *queries, *weights, *sums;  // [R, dim], [R, length], [R, dim]
  int64_t start, length;            // keys of `weights`: from `start`, a multiple of STEP
};

// Elements from a key of a block to that of the next block, 0 for the last one; to prefetch.
inline int64_t to_next(const Plan& plan, const int32_t* blocks, int64_t block, const Scratch& at) {
  if ((block + 1) * plan.block_size >= at.start + at.length) return 0;
  return (blocks[block + 1] - blocks[block]) * plan.block_stride;
}

// The two products of a tile, with vectors; keys [lo, hi), and `lo` is a multiple of STEP for logits.
template <class T, bool paired> struct Products {
  static constexpr int TILE = 8, FEW = 4, MOST = 32, STEP = W;  // rows of a tile, an item; keys
  static constexpr int N = W / 8;           // vectors at a time: TILE * N sums fit the registers
  static constexpr bool ROUNDS_WEIGHTS = false;

  template <int R>
  static void logits(const Plan& plan, const T* keys, const int32_t* blocks, int64_t lo, int64_t hi,
                     const Scratch& at) {
    const int64_t D = plan.dim, size = plan.block_size;
    for (int64_t t = lo; t < hi;) {
      const int64_t in = t % size;
      const T* from = keys + blocks[t / size] * plan.block_stride;
      float* to = at.weights + t - at.start;
      if constexpr (paired) {
        from += in / 16 * 16 * D + in % 16 * 2;
        Floats logits[R] = {};
        for (int64_t d = 0; d < D; d += 2) {
          const Words both = load_as<Words>(from + d * 16);
          const Floats even = (Floats)(both << 16), odd = (Floats)(both & 0xffff0000u);
          for (int r = 0; r < R; r++) logits[r] += at.queries[r * D + d] * even;
          for (int r = 0; r < R; r++) logits[r] += at.queries[r * D + d + 1] * odd;
        }
        for (int r = 0; r < R; r++) store(to + r * at.length, logits[r]);
        t += W;
      } else if (std::min(hi, t - in + size) - t >= N * W) {
        vector_logits<R, N>(plan, from + in, to_next(plan, blocks, t / size, at), at, to);
        t += N * W;
      } else {
        vector_logits<R, 1>(plan, from + in, to_next(plan, blocks, t / size, at), at, to);
        t += W;
      }
    }
  }

  // Logits of V vectors of keys; a key's channels are `block_size` apart.
  template <int R, int V>
  static void vector_logits(const Plan& plan, const T* from, int64_t ahead, const Scratch& at,
                            float* to) {
    Floats logits[V][R] = {};
    for (int64_t d = 0; d < plan.dim; d++, from += plan.block_size) {
      __builtin_prefetch(from + (ahead ? ahead : V * W), 0, 2);  // too many streams for the hardware prefetcher
      for (int v = 0; v < V; v++) {
        const Floats key = load(from + v * W);
        for (int r = 0; r < R; r++) logits[v][r] += at.queries[r * plan.dim + d] * key;
      }
    }
    for (int v = 0; v < V; v++)
      for (int r = 0; r < R; r++) store(to + r * at.length + v * W, logits[v][r]);
  }

  template <int R>
  static void sums(const Plan& plan, const T* values, const int32_t* blocks, int64_t lo, int64_t hi,
                   const Scratch& at) {
    const int64_t D = plan.dim, size = plan.block_size;
    for (int64_t t = lo; t < hi;) {  // by block, so that a block stays in the L1 cache
      const int64_t in = t % size, count = std::min(hi - t, size - in);
      const T* from = values + blocks[t / size] * plan.block_stride;
      const float* weights = at.weights + t - at.start;
      const int64_t ahead = to_next(plan, blocks, t / size, at);
      int64_t d = 0;
      for (; d + N * W <= D; d += N * W) vector_sums<R, N>(plan, from, in, count, ahead, weights, at, d);
      for (; d < D; d += W) vector_sums<R, 1>(plan, from, in, count, ahead, weights, at, d);
      t += count;
    }
  }

  // Adds `count` values of a block, V vectors of channels from `d` on.
  template <int R, int V>
  static void vector_sums(const Plan& plan, const T* block, int64_t in, int64_t count, int64_t ahead,
                          const float* weights, const Scratch& at, int64_t d) {
    const int64_t D = plan.dim, size = plan.block_size;
    Floats sum[V][R];
    for (int v = 0; v < V; v++)
      for (int r = 0; r < R; r++) sum[v][r] = load(at.sums + r * D + d + v * W);
    for (int64_t i = 0; i < count; i++, in++)
      for (int v = 0; v < V; v++) {
        const int64_t c = d + v * W;
        Floats value;
        if constexpr (paired) {
          const T* pair = block + c / 16 * 16 * size + c % 16 * 2 + in / 2 * 32;
          const Words both = load_as<Words>(pair);
          value = (Floats)(in % 2 ? both & 0xffff0000u : both << 16);
        } else {
          __builtin_prefetch(block + in * D + c + ahead, 0, 2);
          value = load(block + in * D + c);
        }
        for (int r = 0; r < R; r++) sum[v][r] += weights[r * at.length + i] * value;
      }
    for (int v = 0; v < V; v++)
      for (int r = 0; r < R; r++) store(at.sums + r * D + d + v * W, sum[v][r]);
  }
};

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
// The same with AMX tiles, which the paired layout is made for; only if `tiles_allowed`.
struct TileProducts {
  static constexpr int TILE = 16, FEW = 16, MOST = 16, STEP = 32;
  static constexpr bool ROUNDS_WEIGHTS = true;

  // fp32 [16, size] -> bf16, rows `size` elements apart
  static Aligned<uint16_t>& halves(const float* from, int64_t size) {
    static thread_local Aligned<uint16_t> found;
    found.resize(TILE * size + 32);
    for (int64_t i = 0; i < TILE * size; i += W) {
      const __m256bh part = _mm512_cvtneps_pbh((__m512)load(from + i));
      std::memcpy(found.data() + i, &part, sizeof(part));
    }
    finish_stores();
    return found;
  }

  template <int R>
  static void logits(const Plan& plan, const BFloat16* keys, const int32_t* blocks,
                     int64_t lo, int64_t hi, const Scratch& at) {
    const int64_t D = plan.dim, size = plan.block_size;
    const uint16_t* queries = halves(at.queries, D).data();
    const Tiles tiles;
    for (int64_t t = lo; t < hi; t += 16) {
      const BFloat16* from = keys + blocks[t / size] * plan.block_stride + t % size * D;
      _tile_zero(0);
      for (int64_t d = 0; d < D; d += 32) {
        _tile_loadd(1, queries + d, 2 * D);
        _tile_loadd(2, from + d * 16, 64);
        _tile_dpbf16ps(0, 1, 2);
      }
      _tile_stored(0, at.weights + t - at.start, 4 * at.length);
    }
  }

  template <int R>
  static void sums(const Plan& plan, const BFloat16* values, const int32_t* blocks,
                   int64_t lo, int64_t hi, const Scratch& at) {
    const int64_t D = plan.dim, size = plan.block_size;
    const uint16_t* weights = halves(at.weights, at.length).data();
    const Tiles tiles;
    alignas(64) uint16_t known[2][512];
    for (int64_t d = 0; d < D; d += 32) {  // two tiles of 16 channels
      _tile_zero(0);
      _tile_zero(1);
      for (int64_t i = 0; i < at.length; i += 32) {
        const int64_t t = at.start + i;
        const BFloat16* left = values + blocks[t / size] * plan.block_stride + d * size + t % size * 16;
        const void *first = left, *second = left + 16 * size;
        if (t < lo || t + 32 > hi) {  // other slots may hold NaN
          std::memcpy(known[0], first, 1024), std::memcpy(known[1], second, 1024);
          for (int64_t k = 0; k < 32; k++)
            if (t + k < lo || t + k >= hi)
              for (int64_t c = 0; c < 32; c++) known[c / 16][k / 2 * 32 + c % 16 * 2 + k % 2] = 0;
          first = known[0], second = known[1];
          finish_stores();
        }
        _tile_loadd(2, weights + i, 2 * at.length);
        _tile_loadd(3, first, 64);
        _tile_loadd(4, second, 64);
        _tile_dpbf16ps(0, 2, 3);
        _tile_dpbf16ps(1, 2, 4);
      }
      _tile_stored(0, at.sums + d, 4 * D);
      _tile_stored(1, at.sums + d + 16, 4 * D);
    }
  }
};
#endif

template <class T, class Product>
void attend(const Plan& plan, const Layer& layer, const Item& item, Aligned<float>& memory,
            float* partial) {  // if several parts: [count, dim] sums, [count] maxima, [count] totals
  constexpr int64_t TILE = Product::TILE, STEP = Product::STEP, MOST = Product::MOST;
  constexpr int64_t CHUNK = 128;  // keys
  const int64_t D = plan.dim, size = plan.block_size, group = plan.heads / plan.kv_heads;
  const int64_t b = item.request, first = item.first, count = item.count;
  const int64_t tiles = (count + TILE - 1) / TILE, rows = tiles * TILE, base = plan.base[b];
  const int64_t start = item.lo / STEP * STEP;
  const int64_t length = std::max((item.hi + STEP - 1) / STEP * STEP - start, STEP);
  memory.resize(rows * (2 * D + length));
  float *q = memory.data(), *sums = q + rows * D, *weights = sums + rows * D;
  const T* keys = static_cast<const T*>(layer.cache) + 2 * item.head * size * D;
  const int32_t* blocks = plan.blocks + b * plan.max_blocks;
  // `product` (lo, hi, scratch, R) for each tile of a chunk, chunk by chunk
  auto multiply_chunks = [&](int64_t lo, int64_t hi, auto product) {
    for (int64_t from = lo, to; from < hi; from = to) {
      to = tiles == 1 ? hi : std::min(hi, (from / CHUNK + 1) * CHUNK);
      for (int64_t r = 0; r < rows; r += TILE) {
        const Scratch at{q + r * D, weights + r * length, sums + r * D, start, length};
        if (count - r <= Product::FEW) product(from, to, at, std::integral_constant<int, Product::FEW>());
        else product(from, to, at, std::integral_constant<int, TILE>());
      }
    }
  };

  auto node = [&](int64_t r) { return (first + r) / group; };
  auto head = [&](int64_t r) { return item.head * group + (first + r) % group; };
  std::fill(q, q + rows * D, 0.0f);
  for (int64_t r = 0; r < count; r++) {
    const T* from = static_cast<const T*>(layer.query) +
                    (plan.row[b] + node(r)) * layer.query_row + head(r) * layer.query_head;
    for (int64_t d = 0; d < D; d += W) store(q + r * D + d, load(from + d));
  }

  if (item.lo < item.hi)
    multiply_chunks(start, start + length, [&](int64_t lo, int64_t hi, const Scratch& at, auto R) {
      Product::template logits<R>(plan, keys, blocks, lo, hi, at);
    });
  for (int64_t i = 0; i < count * length; i += W) {
    Floats x = load(weights + i) * layer.scale;
    if (layer.softcap > 0)  // tanh(y) = 1 - 2 / (exp(2 y) + 1)
      x = layer.softcap * (1.0f - 2.0f / (exponential(x * (2 / layer.softcap)) + 1.0f));
    store(weights + i, x);
  }

  const float nothing = -INFINITY;
  float largest[MOST], totals[MOST];
  for (int64_t r = 0; r < count; r++) {
    float* row = weights + r * length - start;
    const int64_t i = node(r);
    const uint8_t* mask = plan.mask + b * plan.mask_request + i * plan.mask_row;
    std::fill(row + start, row + item.lo, nothing);
    std::fill(row + item.hi, row + start + length, nothing);
    for (int64_t t = std::max(base, item.lo); t < item.hi; t++)
      if (!mask[t - base]) row[t] = nothing;
    if (plan.window) {
      const int64_t* depths = plan.depths + b * plan.depths_request;
      const int64_t query = plan.own[b] - plan.rows[b] + i;
      const int64_t hidden = base + depths[query] - plan.window;  // up to this position
      for (int64_t t = item.lo; t < std::min({hidden + 1, base, item.hi}); t++) row[t] = nothing;
      for (int64_t t = std::max(base, item.lo); t < item.hi; t++)
        if (base + depths[t - base] <= hidden) row[t] = nothing;
    }
    const bool sink = layer.sinks && item.part == 0;
    Floats maxima = load(row + start);
    for (int64_t t = start + W; t < start + length; t += W) {
      const Floats x = load(row + t);
      maxima = x > maxima ? x : maxima;
    }
    float best = sink ? layer.sinks[head(r)] : nothing;
    for (int k = 0; k < W; k++) best = std::max(best, maxima[k]);
    largest[r] = best;
    const float shift = best == nothing ? 0.0f : best;
    Floats total = {};
    for (int64_t t = start; t < start + length; t += W) {
      const Floats x = exponential(load(row + t) - shift);
      total += x;
      store(row + t, x);
    }
    totals[r] = sink ? std::exp(layer.sinks[head(r)] - shift) : 0.0f;
    for (int k = 0; k < W; k++) totals[r] += total[k];
    if (layer.paired && !Product::ROUNDS_WEIGHTS)
      for (int64_t t = item.lo; t < item.hi; t++) row[t] = rounded(row[t]);
  }

  std::fill(sums, sums + rows * D, 0.0f);
  multiply_chunks(item.lo, item.hi, [&](int64_t lo, int64_t hi, const Scratch& at, auto R) {
    Product::template sums<R>(plan, keys + size * D, blocks, lo, hi, at);
  });

  if (item.parts > 1) {
    std::copy(sums, sums + count * D, partial);
    std::copy(largest, largest + count, partial + count * D);
    std::copy(totals, totals + count, partial + count * (D + 1));
    return;
  }
  for (int64_t r = 0; r < count; r++) {
    T* to = static_cast<T*>(layer.out) + (plan.row[b] + node(r)) * layer.out_row +
            head(r) * layer.out_head;
    const float factor = totals[r] > 0 ? 1 / totals[r] : 0.0f;
    for (int64_t d = 0; d < D; d++) write(to + d, sums[r * D + d] * factor, layer.truncate);
  }
}

template <class T>
void merge(const Plan& plan, const Layer& layer, const Item& item, const float* partial) {
  const int64_t D = plan.dim, group = plan.heads / plan.kv_heads, size = item.count * (D + 2);
  const float *largest = partial + item.count * D, *totals = largest + item.count;
  for (int64_t r = 0; r < item.count; r++) {
    float best = -INFINITY, total = 0;
    for (int64_t s = 0; s < item.parts; s++) best = std::max(best, largest[s * size + r]);
    std::vector<float> sum(D);
    for (int64_t s = 0; s < item.parts && best > -INFINITY; s++) {
      const float factor = std::exp(largest[s * size + r] - best);
      total += factor * totals[s * size + r];
      for (int64_t d = 0; d < D; d++) sum[d] += factor * partial[s * size + r * D + d];
    }
    T* to = static_cast<T*>(layer.out) +
            (plan.row[item.request] + (item.first + r) / group) * layer.out_row +
            (item.head * group + (item.first + r) % group) * layer.out_head;
    for (int64_t d = 0; d < D; d++) write(to + d, total > 0 ? sum[d] / total : 0, layer.truncate);
  }
}

template <class T, class Product>
void run_with(const Plan& plan, const Layer& layer) {
  constexpr int64_t MIN_PART = 512, MAX_PART = 2048;  // keys; their weights stay in the L2 cache
  const int64_t group = plan.heads / plan.kv_heads;
  const int64_t wanted = 2 * omp_get_max_threads();
  static std::vector<Item> items;  // layers run one after another
  static std::vector<float> partials;
  auto keys_of = [&](int64_t b) {
    const int64_t begin = plan.window ? std::max(int64_t(0), plan.base[b] - plan.window + 1) : 0;
    return std::pair(begin, plan.base[b] + plan.own[b]);
  };
  // as many rows per item as leave enough items; with one part each, and with the most parts
  int64_t rows = 2 * Product::MOST, whole = 0, most = 0;
  while (most < wanted && rows > Product::TILE) {
    rows /= 2, whole = most = 0;
    for (int64_t b = 0; b < plan.requests; b++) {
      const auto [begin, end] = keys_of(b);
      const int64_t count = plan.kv_heads * ((plan.rows[b] * group + rows - 1) / rows);
      whole += count, most += count * std::max(int64_t(1), (end - begin) / MIN_PART);
    }
  }
  items.clear();
  int64_t kept = 0;
  for (int64_t b = 0; b < plan.requests; b++) {
    const auto [begin, end] = keys_of(b);
    const int64_t parts = std::max({int64_t(1), (end - begin + MAX_PART - 1) / MAX_PART,
                                    std::min((wanted + whole - 1) / whole, (end - begin) / MIN_PART)});
    const int64_t step = (end - begin + parts - 1) / parts, all = plan.rows[b] * group;
    for (int64_t h = 0; h < plan.kv_heads; h++)
      for (int64_t row = 0; row < all; row += rows)
        for (int64_t s = 0; s < parts; s++) {
          const int64_t count = std::min(rows, all - row);
          items.push_back({b, h, row, count, s, parts, std::min(end, begin + s * step),
                           std::min(end, begin + (s + 1) * step), kept});
          if (parts > 1) kept += count * (plan.dim + 2);
        }
  }
  if (kept > int64_t(partials.size())) partials.resize(kept);
  const Item* all = items.data();
  float* partial = partials.data();
  const int64_t count = items.size();
#pragma omp parallel
  {
    static thread_local Aligned<float> memory;
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < count; i++)
      attend<T, Product>(plan, layer, all[i], memory, partial + all[i].partial);
    if (kept) {
#pragma omp for
      for (int64_t i = 0; i < count; i++)
        if (all[i].parts > 1 && all[i].part == 0) merge<T>(plan, layer, all[i], partial + all[i].partial);
    }
  }
}

template <class T, bool paired>
void run(const Plan& plan, const Layer& layer) {
#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
  if constexpr (paired)
    if (tiles_allowed()) return run_with<T, TileProducts>(plan, layer);
#endif
  run_with<T, Products<T, paired>>(plan, layer);
}

}  // namespace

extern "C" void tree_attention(const Plan* plan, const Layer* layer) {
  if (layer->dtype == 0) run<float, false>(*plan, *layer);
  else if (layer->dtype == 2) run<Float16, false>(*plan, *layer);
  else if (layer->paired) run<BFloat16, true>(*plan, *layer);
  else run<BFloat16, false>(*plan, *layer);
}
