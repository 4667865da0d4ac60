//! Records of traffic, from the event loop that notes them to the file that they are written to.
//!
//! A record is noted as the text of its line, without the names of its prompt's blocks: the hashes that those
//! are made from lie next to it. Names are made where lines are packed, many at a time, by code that is warm.

use std::ops::Range;

/// What one stored block of deflate holds (RFC 1951 §3.2.4).
const STORED_MAX_BYTES: usize = 0xFFFF;

/// Final or not, the length, and its complement.
const STORED_HEAD_BYTES: usize = 5;

/// Deflate, no name, no time, no system (RFC 1952 §2.3).
const GZIP_HEAD: [u8; 10] = *b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff";

const GZIP_END_BYTES: usize = 8;

/// What follows the names of a request's blocks.
const REQUEST_END: &[u8] = b"\"}\n";

/// The names that are made at a time; their bytes are whole groups of base64.
const NAMES: usize = 96;

struct Record {
    text_end: usize,
    hashes_end: usize,
    is_request: bool,
    at_s: f64,
}

/// Lines that were noted, in their order.
#[derive(Default)]
pub struct Lines {
    text: Vec<u8>,
    hashes: Vec<u64>,
    records: Vec<Record>,
}

/// What lines that follow each other take.
#[derive(Default)]
pub struct Size {
    n_lines: usize,
    n_bytes: usize,
    /// What of it are names.
    n_name_bytes: usize,
}

impl Size {
    /// Whether packing them is worth a search for repeats. Names look random: searching them takes long, and
    /// saves a quarter at best.
    pub fn is_searched(&self) -> bool {
        2 * self.n_name_bytes < self.n_bytes
    }

    /// The room that is enough for them, stored or not.
    pub fn room_bytes(&self) -> usize {
        let n_blocks = self.n_lines + self.n_bytes / STORED_MAX_BYTES + 1;
        GZIP_HEAD.len() + self.n_bytes + STORED_HEAD_BYTES * n_blocks + GZIP_END_BYTES
    }
}

impl Lines {
    pub fn n_records(&self) -> usize {
        self.records.len()
    }

    /// The bytes that are held here.
    pub fn n_bytes(&self) -> usize {
        self.text.len() + 8 * self.hashes.len()
    }

    /// Forgets the records, and keeps their memory.
    pub fn clear(&mut self) {
        self.text.clear();
        self.hashes.clear();
        self.records.clear();
    }

    /// Notes a whole line.
    pub fn add(&mut self, line: &[u8], at_s: f64) {
        self.text.extend_from_slice(line);
        self.end(false, at_s);
    }

    /// Notes the line of a request, whose text `write` writes up to the names of its blocks. Nothing is left
    /// of one that cannot be written.
    pub fn add_request<E>(
        &mut self,
        hashes: &[u64],
        at_s: f64,
        write: impl FnOnce(&mut Text<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        let begin = self.text.len();
        let written = write(&mut Text(&mut self.text));
        if written.is_err() {
            self.text.truncate(begin);
            return written;
        }
        self.hashes.extend_from_slice(hashes);
        self.end(true, at_s);
        written
    }

    fn end(&mut self, is_request: bool, at_s: f64) {
        let (text_end, hashes_end) = (self.text.len(), self.hashes.len());
        self.records.push(Record { text_end, hashes_end, is_request, at_s });
    }

    /// The moment of a line.
    ///
    /// # Panics
    /// Without it, as all that follows.
    pub fn at_s(&self, number: usize) -> f64 {
        self.records[number].at_s
    }

    /// Where those lines from `first` on end that take `bytes_max` at most; there is always one.
    pub fn end_of(&self, first: usize, bytes_max: usize) -> usize {
        let mut end = first;
        let mut n_bytes = 0;
        while end < self.records.len() {
            n_bytes += self.line_bytes(end).0;
            if end > first && n_bytes > bytes_max {
                break;
            }
            end += 1;
        }
        end
    }

    /// What lines take.
    pub fn size(&self, lines: Range<usize>) -> Size {
        lines.fold(Size::default(), |size, number| {
            let (n_bytes, n_name_bytes) = self.line_bytes(number);
            Size {
                n_lines: size.n_lines + 1,
                n_bytes: size.n_bytes + n_bytes,
                n_name_bytes: size.n_name_bytes + n_name_bytes,
            }
        })
    }

    /// Writes the lines of records to `out` as they are. Returns how many bytes they are.
    ///
    /// # Panics
    /// When `out` is shorter than their [`Size::room_bytes`].
    pub fn write(&self, lines: Range<usize>, key: &[u8; 16], out: &mut [u8]) -> usize {
        lines.fold(0, |at, number| at + self.write_line(number, key, &mut out[at..]))
    }

    /// Writes the lines of records to `out` as a member of a gzip file that has them as they are. Returns how
    /// many bytes it is.
    ///
    /// # Panics
    /// When `out` is shorter than their [`Size::room_bytes`].
    pub fn store(&self, lines: Range<usize>, key: &[u8; 16], out: &mut [u8]) -> usize {
        let mut sum = crc32fast::Hasher::new();
        let mut n_content = 0;
        out[..GZIP_HEAD.len()].copy_from_slice(&GZIP_HEAD);
        let mut head = GZIP_HEAD.len();
        let mut n_held = 0; // in the block that begins there
        for number in lines {
            let (n_line, _) = self.line_bytes(number);
            if n_held > 0 && n_held + n_line > STORED_MAX_BYTES {
                head = end_block(out, head, n_held, false);
                n_held = 0;
            }
            let at = head + STORED_HEAD_BYTES + n_held;
            self.write_line(number, key, &mut out[at..]);
            sum.update(&out[at..at + n_line]);
            n_content += n_line;
            n_held += n_line;
            while n_held > STORED_MAX_BYTES {
                let rest = head + STORED_HEAD_BYTES + STORED_MAX_BYTES;
                n_held -= STORED_MAX_BYTES;
                out.copy_within(rest..rest + n_held, rest + STORED_HEAD_BYTES);
                head = end_block(out, head, STORED_MAX_BYTES, false);
            }
        }
        let at = end_block(out, head, n_held, true);
        out[at..at + 4].copy_from_slice(&sum.finalize().to_le_bytes());
        out[at + 4..at + GZIP_END_BYTES].copy_from_slice(&(n_content as u32).to_le_bytes());
        at + GZIP_END_BYTES
    }

    /// How long a line is, and what of it are names.
    fn line_bytes(&self, number: usize) -> (usize, usize) {
        let (text, hashes) = self.parts(number);
        let n_end = if self.records[number].is_request { REQUEST_END.len() } else { 0 };
        let n_names = name_chars(hashes.len());
        (text.len() + n_names + n_end, n_names)
    }

    fn parts(&self, number: usize) -> (&[u8], &[u64]) {
        let (text_begin, hashes_begin) = match number {
            0 => (0, 0),
            _ => (self.records[number - 1].text_end, self.records[number - 1].hashes_end),
        };
        let record = &self.records[number];
        (&self.text[text_begin..record.text_end], &self.hashes[hashes_begin..record.hashes_end])
    }

    fn write_line(&self, number: usize, key: &[u8; 16], out: &mut [u8]) -> usize {
        let (text, hashes) = self.parts(number);
        let mut at = text.len();
        out[..at].copy_from_slice(text);
        if self.records[number].is_request {
            at += write_names(hashes, key, &mut out[at..]);
            out[at..at + REQUEST_END.len()].copy_from_slice(REQUEST_END);
            at += REQUEST_END.len();
        }
        at
    }
}

/// Writes the head of a stored block of `n_bytes`; returns where the next one begins.
fn end_block(out: &mut [u8], head: usize, n_bytes: usize, is_last: bool) -> usize {
    let length = n_bytes as u16;
    out[head] = u8::from(is_last);
    out[head + 1..head + 3].copy_from_slice(&length.to_le_bytes());
    out[head + 3..head + STORED_HEAD_BYTES].copy_from_slice(&(!length).to_le_bytes());
    head + STORED_HEAD_BYTES + n_bytes
}

/// Writes the names of blocks in base64 (RFC 4648 §4): SipHash-2-4 of each hash, both as 8 bytes, little-endian.
/// Returns how many characters they are.
fn write_names(hashes: &[u64], key: &[u8; 16], out: &mut [u8]) -> usize {
    let n_chars = name_chars(hashes.len());
    let chars = &mut out[..n_chars];
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: this processor has it.
        unsafe { encode_by_avx2(hashes, key, chars) };
        return n_chars;
    }
    encode(hashes, key, chars);
    n_chars
}

/// [`encode`] compiled for AVX2, which takes a third of the time: its loops make four hashes and 32 characters
/// at a time.
///
/// # Safety
/// The processor has AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn encode_by_avx2(hashes: &[u64], key: &[u8; 16], chars: &mut [u8]) {
    encode(hashes, key, chars);
}

#[inline(always)] // so that it is compiled for the processor that its caller names
fn encode(hashes: &[u64], key: &[u8; 16], chars: &mut [u8]) {
    let state = sip_state(key);
    for (chars, hashes) in chars.chunks_mut(NAMES * 8 / 3 * 4).zip(hashes.chunks(NAMES)) {
        let mut names = [0; 8 * NAMES];
        for (name, &hash) in names.chunks_exact_mut(8).zip(hashes) {
            name.copy_from_slice(&sip_hash(state, hash).to_le_bytes());
        }
        for (four, three) in chars.chunks_exact_mut(4).zip(names.chunks_exact(3)) {
            four[0] = base64(three[0] >> 2);
            four[1] = base64(three[0] << 4 | three[1] >> 4);
            four[2] = base64(three[1] << 2 | three[2] >> 6);
            four[3] = base64(three[2]);
        }
    }
    let n_padding = (3 - 8 * hashes.len() % 3) % 3;
    let n_chars = chars.len();
    chars[n_chars - n_padding..].fill(b'=');
}

/// What SipHash begins with under a key.
fn sip_state(key: &[u8; 16]) -> [u64; 4] {
    let key = u128::from_le_bytes(*key);
    let (low, high) = (key as u64, (key >> 64) as u64);
    [
        low ^ 0x736f_6d65_7073_6575,
        high ^ 0x646f_7261_6e64_6f6d,
        low ^ 0x6c79_6765_6e65_7261,
        high ^ 0x7465_6462_7974_6573,
    ]
}

/// SipHash-2-4 of a message of 8 bytes. It has no branch and reads no table, so that compilers make several at
/// a time.
#[inline(always)]
fn sip_hash(mut v: [u64; 4], message: u64) -> u64 {
    for block in [message, 8 << 56] {
        v[3] ^= block;
        sip_rounds(&mut v, 2);
        v[0] ^= block;
    }
    v[2] ^= 0xFF;
    sip_rounds(&mut v, 4);
    v[0] ^ v[1] ^ v[2] ^ v[3]
}

#[inline(always)]
fn sip_rounds(v: &mut [u64; 4], n: usize) {
    for _ in 0..n {
        v[0] = v[0].wrapping_add(v[1]);
        v[2] = v[2].wrapping_add(v[3]);
        v[1] = v[1].rotate_left(13) ^ v[0];
        v[3] = v[3].rotate_left(16) ^ v[2];
        v[0] = v[0].rotate_left(32).wrapping_add(v[3]);
        v[2] = v[2].wrapping_add(v[1]);
        v[1] = v[1].rotate_left(17) ^ v[2];
        v[3] = v[3].rotate_left(21) ^ v[0];
        v[2] = v[2].rotate_left(32);
    }
}

/// How many characters the names of `n_blocks` are.
fn name_chars(n_blocks: usize) -> usize {
    (8 * n_blocks).div_ceil(3) * 4
}

/// The character of the lowest six bits, without a table, as [`sip_hash`] is.
#[inline(always)]
fn base64(bits: u8) -> u8 {
    let value = bits & 0x3F;
    let letter = value + b'A' + if value > 25 { b'a' - b'Z' - 1 } else { 0 };
    let digit = letter - if value > 51 { b'z' + 1 - b'0' } else { 0 };
    digit - if value > 61 { b'9' + 1 - b'+' } else { 0 } + if value > 62 { b'/' - b'+' - 1 } else { 0 }
}

/// A moment or a duration that is no number of microseconds.
#[derive(Debug, PartialEq)]
pub struct NotSeconds(pub f64);

/// The text of one line, as it is written.
pub struct Text<'a>(&'a mut Vec<u8>);

impl Text<'_> {
    pub fn raw(&mut self, text: &[u8]) {
        self.0.extend_from_slice(text);
    }

    /// A string, with its quotes (RFC 8259 §7).
    pub fn string(&mut self, text: &str) {
        self.0.push(b'"');
        let bytes = text.as_bytes();
        let mut begin = 0;
        for (at, &byte) in bytes.iter().enumerate() {
            if byte >= 0x20 && byte != b'"' && byte != b'\\' {
                continue;
            }
            self.0.extend_from_slice(&bytes[begin..at]);
            begin = at + 1;
            if byte < 0x20 {
                let hex = b"0123456789abcdef";
                self.0.extend_from_slice(b"\\u00");
                self.0.extend([hex[usize::from(byte >> 4)], hex[usize::from(byte & 0xF)]]);
            } else {
                self.0.extend([b'\\', byte]);
            }
        }
        self.0.extend_from_slice(&bytes[begin..]);
        self.0.push(b'"');
    }

    pub fn whole(&mut self, number: i64) {
        self.sign(number);
        self.digits(number.unsigned_abs(), 1);
    }

    /// Seconds to the microsecond: the decimal that is read as the float which Python's
    /// `round(seconds * 1e6) / 1e6` is.
    pub fn seconds(&mut self, seconds: f64) -> Result<(), NotSeconds> {
        const EXACT: f64 = (1u64 << 53) as f64;
        let us = (seconds * 1e6).round_ties_even();
        if us.is_nan() || us.abs() > EXACT {
            return Err(NotSeconds(seconds));
        }
        let us = us as i64;
        self.sign(us);
        let us = us.unsigned_abs();
        self.digits(us / 1_000_000, 1);
        self.0.push(b'.');
        self.digits(us % 1_000_000, 6);
        Ok(())
    }

    fn sign(&mut self, number: i64) {
        if number < 0 {
            self.0.push(b'-');
        }
    }

    /// At least `n_min` digits.
    fn digits(&mut self, mut number: u64, n_min: usize) {
        let mut digits = [b'0'; 20];
        let mut at = digits.len();
        while number > 0 {
            at -= 1;
            digits[at] = b'0' + (number % 10) as u8;
            number /= 10;
        }
        self.0.extend_from_slice(&digits[at.min(digits.len() - n_min)..]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_siphash_in_base64() {
        let key: [u8; 16] = std::array::from_fn(|at| at as u8);
        let hash = u64::from_le_bytes(std::array::from_fn(|at| at as u8));
        let mut out = [0; 44];
        // the ninth vector of the reference implementation, 0x93f5f5799a932462
        assert_eq!(write_names(&[hash], &key, &mut out), 12);
        assert_eq!(&out[..12], b"YiSTmnn19ZM=");
        assert_eq!(write_names(&[hash; 2], &key, &mut out), 24);
        assert_eq!(&out[..24], b"YiSTmnn19ZNiJJOaefX1kw==");
        assert_eq!(write_names(&[hash; 4], &key, &mut out), 44);
        assert_eq!(&out[..44], b"YiSTmnn19ZNiJJOaefX1k2Ikk5p59fWTYiSTmnn19ZM=");
        assert_eq!(write_names(&[], &key, &mut out), 0);
    }

    #[test]
    fn names_are_the_same_on_every_processor() {
        let key: [u8; 16] = std::array::from_fn(|at| at as u8);
        let hashes: Vec<u64> =
            (0..3 * NAMES as u64).map(|at| at.wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect();
        for n_names in 0..hashes.len() {
            let (mut here, mut plain) = (vec![0; name_chars(n_names)], vec![0; name_chars(n_names)]);
            write_names(&hashes[..n_names], &key, &mut here);
            encode(&hashes[..n_names], &key, &mut plain);
            assert_eq!(here, plain);
            for (at, name) in hashes[..n_names].iter().enumerate().step_by(3) {
                let mut alone = [0; 12];
                write_names(&[*name], &key, &mut alone);
                assert_eq!(plain[at / 3 * 32..][..10], alone[..10]);
            }
        }
    }

    #[test]
    fn seconds_are_whole_microseconds() {
        let written = |seconds| {
            let mut line = Vec::new();
            Text(&mut line).seconds(seconds).map(|()| String::from_utf8(line).unwrap())
        };
        for (seconds, text) in [
            (0.0, "0.000000"),
            (1.5, "1.500000"),
            (-0.25, "-0.250000"),
            (0.000_001_5, "0.000002"),
            (0.000_002_5, "0.000002"),
            (-0.000_000_4, "0.000000"),
            (86_400.000_001, "86400.000001"),
        ] {
            assert_eq!(written(seconds).as_deref(), Ok(text));
        }
        for wrong in [f64::INFINITY, f64::NEG_INFINITY, 1e10] {
            assert_eq!(written(wrong), Err(NotSeconds(wrong)));
        }
        assert!(written(f64::NAN).is_err());
    }

    #[test]
    fn strings_are_escaped() {
        let mut line = Vec::new();
        Text(&mut line).string("a\"b\\\n\u{1f}é\u{7f}");
        assert_eq!(line, "\"a\\\"b\\\\\\u000a\\u001fé\u{7f}\"".as_bytes());
    }

    #[test]
    fn of_a_line_that_fails_nothing_is_left() {
        let mut lines = Lines::default();
        lines.add(b"before\n", 1.0);
        let failed = lines.add_request(&[1, 2], 2.0, |text| {
            text.raw(b"half");
            Err(())
        });
        assert_eq!((failed, lines.n_records(), lines.n_bytes()), (Err(()), 1, 7));
        lines.add(b"after\n", 3.0);
        let mut out = vec![0; lines.size(0..2).room_bytes()];
        assert_eq!(lines.write(0..2, &[0; 16], &mut out), 13);
        assert_eq!(&out[..13], b"before\nafter\n");
    }
}
