// Lookup in the texts of requests on the host; `lookup/search.py` calls it.

extern "C" {

struct Search {
  const int32_t* texts;            // [rows, >= length], `row_stride` apart
  const int64_t *rows, *lengths;   // [batch]
  int64_t row_stride, batch, count, max_match, window, levels;
  int64_t *matched, *found, *agreement;  // out, [batch], [batch, count], [batch, count]
};

// The longest match of each text's end, the latest if several, the tokens after it, and agreement.
void lookup_search(const Search* s) {
  std::vector<int64_t> of(s->count), agreed(s->count);  // occurrences, by depth
  for (int64_t b = 0; b < s->batch; b++) {
    const int32_t* text = s->texts + s->rows[b] * s->row_stride;
    const int64_t last = s->lengths[b] - 1;
    int64_t best = 0, start = 0;
    for (int64_t place = last - 1; place >= 0 && best < s->max_match; place--) {
      const int64_t most = std::min(s->max_match, place + 1);
      int64_t length = 0;
      while (length < most && text[place - length] == text[last - length]) length++;
      if (length > best) best = length, start = place + 1;
    }
    s->matched[b] = best;
    int64_t *chain = s->found + b * s->count, *agreement = s->agreement + b * s->count;
    if (best == 0) {
      std::fill_n(chain, s->count, 0), std::fill_n(agreement, s->count, 0);
      continue;
    }
    for (int64_t d = 0; d < s->count; d++) chain[d] = text[start + d % (last + 1 - start)];
    std::fill(of.begin(), of.end(), 0), std::fill(agreed.begin(), agreed.end(), 0);
    for (int64_t place = std::max<int64_t>(last - s->window, 0); place < last; place++) {
      if (text[place] != text[last]) continue;
      for (int64_t d = 0; d < std::min(s->count, last - place); d++) {
        of[d]++;
        if (text[place + 1 + d] != chain[d]) break;
        agreed[d]++;
      }
    }
    for (int64_t d = 0; d < s->count; d++) agreement[d] = s->levels * agreed[d] / (of[d] + 2);
  }
}

struct Estimates {  // of `lookup.Lookup`
  float *right, *tried;                  // [cells]
  const float* prior;                    // [cells]
  const int64_t* cell_of;                // [2, >= max_match + count]
  int64_t *found, *cell, *length;        // [slots, count] twice, [slots]
  int64_t cells, count, cell_stride;
  float prior_tokens, window, max_chance, min_survival;
};

// Updates from the new tokens of the requests in `slots` and their last continuations.
void lookup_learn(const Estimates* e, const int64_t* slots, int64_t batch, const int32_t* texts,
                  int64_t row_stride, const int64_t* rows, const int64_t* lengths,
                  const int64_t* num_new) {
  std::vector<float> rights(e->cells), tries(e->cells);
  for (int64_t b = 0; b < batch; b++) {
    int64_t& before = e->length[slots[b]];
    const int64_t* found = e->found + slots[b] * e->count;
    const int64_t* cell = e->cell + slots[b] * e->count;
    const int32_t* text = texts + rows[b] * row_stride;
    const int64_t num = before + num_new[b] == lengths[b] ? std::min(num_new[b], e->count) : 0;
    for (int64_t d = 0; d < num && found[d] >= 0; d++) {
      tries[cell[d]] += 1;
      if (found[d] != text[before + d]) break;
      rights[cell[d]] += 1;
    }
    before = -1;
  }
  for (int64_t c = 0; c < e->cells; c++) {
    const float kept = std::exp(-tries[c] / e->window);
    e->right[c] = kept * e->right[c] + rights[c];
    e->tried[c] = kept * e->tried[c] + tries[c];
  }
}

// Stores the continuations found, up to the useful depth or a token that is none, and computes
// their log-survivals [batch, count]. Unlikely tokens get -inf, and are stored to be learned from.
void lookup_extend(const Estimates* e, const int64_t* slots, int64_t batch, int64_t vocab,
                   const int64_t* lengths, const int64_t* depth, const bool* sampled,
                   const int64_t* matched, const int64_t* agreement, int64_t* found,
                   float* survival) {
  for (int64_t b = 0; b < batch; b++) {
    const int64_t first = b * e->count, own = slots[b] * e->count;
    float log_survival = 0;
    for (int64_t d = 0, ends = matched[b] == 0; d < e->count; d++) {
      ends |= d >= depth[b] || found[first + d] < 0 || found[first + d] >= vocab;
      const int64_t c =
          e->cell_of[sampled[b] * e->cell_stride + matched[b] + d] + agreement[first + d];
      const float chance =
          (e->right[c] + e->prior_tokens * e->prior[c]) / (e->tried[c] + e->prior_tokens);
      log_survival += std::log(std::min(chance, e->max_chance));
      const bool drafted = !ends && log_survival >= e->min_survival;
      survival[first + d] = drafted ? log_survival : -std::numeric_limits<float>::infinity();
      if (ends) found[first + d] = -1;
      e->found[own + d] = found[first + d];
      e->cell[own + d] = c;
    }
    e->length[slots[b]] = lengths[b];
  }
}

struct Nodes {  // [batch, own or all nodes]
  int64_t *tokens, *parents;
  float* values;  // log-survivals
  int64_t* source;
};

struct Join {
  Nodes trees, out;
  const int64_t* chain;   // [batch, size]
  const float* survival;  // [batch, size], decreasing, -inf after the chain's end
  int64_t batch, own, nodes, size, levels, from_both, from_lookup;  // tree nodes: given, all
};

// The best nodes of each tree and of the chain below its root, without duplicates.
void lookup_join(const Join* j) {
  const int64_t N = j->own, nodes = j->nodes, all = N + j->size;
  std::vector<int64_t> order(all), place(all), parents(all), tokens(all), source(all);
  std::vector<float> values(all);
  for (int64_t b = 0; b < j->batch; b++) {
    const int64_t *chain = j->chain + b * j->size, first = b * N, out = b * nodes;
    const float* survival = j->survival + b * j->size;
    std::copy_n(j->trees.tokens + first, N, tokens.begin());
    std::copy_n(j->trees.parents + first, N, parents.begin());
    std::copy_n(j->trees.values + first, N, values.begin());
    std::copy_n(j->trees.source + first, N, source.begin());
    int64_t at = 0, shared = 0;  // last tree node shared with the chain, and their number
    for (; shared < std::min(j->levels, j->size) && std::isfinite(survival[shared]); shared++) {
      int64_t node = 0;
      while (node < N && !(parents[node] == at && tokens[node] == chain[shared] &&
                           std::isfinite(values[node])))
        node++;
      if (node == N) break;
      at = node;
      values[node] = std::max(values[node], survival[shared]);
      source[node] = j->from_both;
    }
    for (int64_t d = 0; d < j->size; d++) {
      tokens[N + d] = std::max<int64_t>(chain[d], 0);
      parents[N + d] = d == shared ? at : N + d - 1;
      values[N + d] = d < shared ? -std::numeric_limits<float>::infinity() : survival[d];
      source[N + d] = j->from_lookup;
    }
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int64_t a, int64_t c) { return values[a] > values[c]; });
    std::fill(place.begin(), place.end(), 0);
    for (int64_t i = 0; i < std::min(nodes, all); i++) place[order[i]] = i;
    for (int64_t i = 0; i < nodes; i++) {
      const bool is_node = i < all;
      const int64_t node = is_node ? order[i] : 0;
      j->out.tokens[out + i] = is_node ? tokens[node] : 0;
      j->out.parents[out + i] = i ? place[std::max<int64_t>(parents[node], 0)] : -1;
      j->out.values[out + i] = is_node ? values[node] : -std::numeric_limits<float>::infinity();
      j->out.source[out + i] = is_node ? source[node] : 0;
    }
  }
}
}
