//! How long one engine step takes; `kvrouter.core.timing.Timing` has the formula.

/// Milliseconds, in the order of the formula's terms.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Timing {
    pub prefill_quadratic: f64,
    pub prefill_linear: f64,
    pub prefill_base: f64,
    pub prefill_attention: f64,
    pub decode_quadratic: f64,
    pub decode_linear: f64,
    pub decode_base: f64,
    pub decode_min: f64,
    pub decode_sequence: f64,
    pub decode_kv_token: f64,
    pub mixed_kv_token: f64,
}

impl From<[f64; 11]> for Timing {
    fn from(figures: [f64; 11]) -> Self {
        let [prefill_quadratic, prefill_linear, prefill_base, prefill_attention, rest @ ..] = figures;
        let [decode_quadratic, decode_linear, decode_base, decode_min, rest @ ..] = rest;
        let [decode_sequence, decode_kv_token, mixed_kv_token] = rest;
        Timing {
            prefill_quadratic,
            prefill_linear,
            prefill_base,
            prefill_attention,
            decode_quadratic,
            decode_linear,
            decode_base,
            decode_min,
            decode_sequence,
            decode_kv_token,
            mixed_kv_token,
        }
    }
}

impl From<Timing> for [f64; 11] {
    fn from(timing: Timing) -> Self {
        [
            timing.prefill_quadratic,
            timing.prefill_linear,
            timing.prefill_base,
            timing.prefill_attention,
            timing.decode_quadratic,
            timing.decode_linear,
            timing.decode_base,
            timing.decode_min,
            timing.decode_sequence,
            timing.decode_kv_token,
            timing.mixed_kv_token,
        ]
    }
}

/// What a step computes.
#[derive(Clone, Copy, Default)]
pub(crate) struct StepLoad {
    pub prefill_tokens: u64,
    /// Pairs of a prompt token and one that it attends to.
    pub attended: u64,
    pub n_decoding: u64,
    /// Tokens of KV that the decoding ones read.
    pub kv_tokens: u64,
    /// The share of KV blocks in use.
    pub utilisation: f64,
}

impl Timing {
    /// The seconds of `repeats` steps of such a load, each of which reads a token more of every sequence than the
    /// one before: one figure where all are alike. Several only where all decode.
    pub(crate) fn steps_s(&self, load: StepLoad, repeats: usize, steps_s: &mut Vec<f64>) {
        steps_s.clear();
        let mut prefill_ms = self.prefill_ms(load.prefill_tokens, load.attended);
        if load.n_decoding == 0 {
            steps_s.push(prefill_ms / 1_000.0);
            return;
        }
        if load.prefill_tokens > 0 {
            prefill_ms += self.mixed_kv_token * load.kv_tokens as f64;
        }
        let n_distinct = if self.decode_kv_token == 0.0 { 1 } else { repeats };
        steps_s.extend((0..n_distinct as u64).map(|at| {
            let kv_tokens = load.kv_tokens + at * load.n_decoding;
            (prefill_ms + self.decode_ms(load.utilisation, load.n_decoding, kv_tokens)) / 1_000.0
        }));
    }

    fn prefill_ms(&self, new_tokens: u64, attended: u64) -> f64 {
        if new_tokens == 0 {
            return 0.0;
        }
        let new = new_tokens as f64;
        let curve = (self.prefill_quadratic * new + self.prefill_linear) * new + self.prefill_base;
        curve + self.prefill_attention * attended as f64
    }

    fn decode_ms(&self, utilisation: f64, n_sequences: u64, kv_tokens: u64) -> f64 {
        let curve =
            (self.decode_quadratic * utilisation + self.decode_linear) * utilisation + self.decode_base;
        let lasts = if curve > self.decode_min { curve } else { self.decode_min };
        lasts + self.decode_sequence * n_sequences as f64 + self.decode_kv_token * kv_tokens as f64
    }
}
