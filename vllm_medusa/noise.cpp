// The Gumbel noise of vLLM's CPU sampler; `noise.py` calls it.

namespace {

typedef int64_t Longs __attribute__((vector_size(8 * W)));
typedef uint64_t Hashes __attribute__((vector_size(8 * W)));
typedef double Doubles __attribute__((vector_size(8 * W)));

template <class T> T mixed(T z) {  // SplitMix64's finalizer
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

// -log(-log u) of W numbers u; v = 1 - u is given too, because the largest noise is near u = 1.
inline Floats gumbel(Floats u, Floats v) {
  Floats series = v * 0.125f;  // -log(1 - v) = v + v^2 / 2 + ...
  for (float c : {1.0f / 7, 1.0f / 6, 0.2f, 0.25f, 1.0f / 3, 0.5f, 1.0f}) series = (series + c) * v;
  return -logarithm(v < 0.25f ? series : -logarithm(u));
}

// The noise of W tokens; ``base`` is the mixed seed.
inline Floats noise_at(uint64_t base, Hashes ids) {
  constexpr double UNIT = 1.0 / (1ll << 53);
  const Longs bits = (Longs)(mixed(base + (ids + 1) * 0x9e3779b97f4a7c15u) >> 11);
  const Doubles u = (__builtin_convertvector(bits, Doubles) + 0.5) * UNIT;
  const Doubles v = (__builtin_convertvector((1ll << 53) - bits, Doubles) - 0.5) * UNIT;
  return gumbel(__builtin_convertvector(u, Floats), __builtin_convertvector(v, Floats));
}

void noise_of(uint64_t seed, const int64_t* ids, int64_t count, float* out) {
  const uint64_t base = mixed(seed);
  for (int64_t i = 0; i < count; i += W) {
    const int64_t lanes = std::min(int64_t(W), count - i);
    Hashes own = {};
    std::memcpy(&own, ids + i, lanes * sizeof(*ids));
    const Floats found = noise_at(base, own);
    std::memcpy(out + i, &found, lanes * sizeof(*out));
  }
}

struct Largest {  // sums of logit and noise
  float first = -INFINITY, second = -INFINITY;
  int64_t token = -1;

  void add(float sum, int64_t id) {
    if (sum > first) second = first, first = sum, token = id;
    else second = std::max(second, sum);
  }
};

// Of `count` tokens from `start` on.
Largest largest_sums(uint64_t base, const float* logits, int64_t start, int64_t count) {
  Floats first = {}, second = {};
  first -= INFINITY, second = first;
  Ints token = {};
  Hashes ids;
  for (int64_t lane = 0; lane < W; lane++) ids[lane] = start + lane;
  for (int64_t i = 0; i < count; i += W, ids += W) {
    const float* from = logits + start + i;
    const Floats logit = i + W <= count ? load(from) : load_some(from, count - i);
    const Floats sum = logit + noise_at(base, ids);
    const Ints more = sum > first;
    const Floats rest = more ? first : sum;
    second = rest > second ? rest : second;
    first = more ? sum : first;
    token = more ? (Ints{} + int32_t(i)) : token;
  }
  Largest found;
  for (int64_t lane = 0; lane < W; lane++) {
    found.add(first[lane], start + token[lane] + lane);
    found.second = std::max(found.second, second[lane]);
  }
  return found;
}

}  // namespace

// tokens [rows]: argmax of logits [rows, vocab] and noise; -1: the two largest sums are too close,
// or there are none. Errors are below 1e-5 and, of logits, below 1e-7 of their size.
extern "C" void gumbel_argmax(const float* logits, int64_t rows, int64_t vocab,
                              const int64_t* seeds, int64_t* tokens) {
  constexpr int64_t PART = 4096;
  const int64_t parts = (vocab + PART - 1) / PART;
  std::vector<Largest> found(rows * parts);
#pragma omp parallel for schedule(static)
  for (int64_t task = 0; task < rows * parts; task++) {
    const int64_t row = task / parts, start = task % parts * PART;
    const int64_t count = std::min(PART, vocab - start);
    found[task] = largest_sums(mixed(uint64_t(seeds[row])), logits + row * vocab, start, count);
  }
  for (int64_t row = 0; row < rows; row++) {
    Largest all;
    for (int64_t part = 0; part < parts; part++) {
      const Largest& own = found[row * parts + part];
      all.add(own.first, own.token), all.second = std::max(all.second, own.second);
    }
    const bool is_clear = all.first - all.second > 1e-4f + 1e-6f * std::abs(all.first);
    tokens[row] = is_clear && std::isfinite(all.first) ? all.token : -1;
  }
}

// out [rows, count], of the tokens `ids`; a row of zeros for seeds < 0.
extern "C" void gumbel_noise(const int64_t* seeds, int64_t rows, const int64_t* ids, int64_t count,
                             float* out) {
  constexpr int64_t PART = 2048;
  const int64_t parts = (count + PART - 1) / PART;
#pragma omp parallel for schedule(static) if (rows * count > 4096)
  for (int64_t task = 0; task < rows * parts; task++) {
    const int64_t row = task / parts, at = task % parts * PART;
    const int64_t size = std::min(PART, count - at);
    float* to = out + row * count + at;
    if (seeds[row] < 0) std::fill_n(to, size, 0.0f);
    else noise_of(seeds[row], ids + at, size, to);
  }
}
