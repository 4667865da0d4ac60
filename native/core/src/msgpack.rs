//! A scan of msgpack, by which counts and depth are bounded before any object is built, and a reader of msgpack in one
//! form. Neither builds objects.

/// What one frame may hold.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Containers in containers.
    pub depth: usize,
    /// Values of all kinds, keys and containers among them.
    pub values: usize,
    /// Arrays and maps.
    pub containers: usize,
}

/// The bound that a frame is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    Depth,
    Values,
    Containers,
}

/// A frame that holds more than its limits allow: why, and the byte where that begins.
#[derive(Debug, PartialEq, Eq)]
pub struct Refused {
    pub fault: Fault,
    pub at: usize,
}

/// Refuses a frame over its limits. Values count as soon as they are announced. What is cut short, or no
/// msgpack, ends the scan: whoever decodes it refuses it.
pub fn scan(frame: &[u8], limits: &Limits) -> Result<(), Refused> {
    let mut outer: Vec<usize> = Vec::new();
    let (mut left, mut at) = (1_usize, 0_usize);
    let (mut values, mut containers) = (1_usize, 0_usize);
    loop {
        while left == 0 {
            match outer.pop() {
                Some(more) => left = more,
                None => return Ok(()),
            }
        }
        left -= 1;
        let Some((inner, behind)) = value_at(frame, at) else { return Ok(()) };
        if let Some(inner) = inner {
            containers += 1;
            values = values.saturating_add(inner);
            let refused = |fault| Err(Refused { fault, at });
            if containers > limits.containers {
                return refused(Fault::Containers);
            }
            if values > limits.values {
                return refused(Fault::Values);
            }
            if outer.len() >= limits.depth {
                return refused(Fault::Depth);
            }
            outer.push(left);
            left = inner;
        }
        at = behind;
    }
}

/// How many values are in the container that begins at `at`, None where it is no container; and where it, or
/// what is not one, is read on. None at the end of the frame, and for what is no msgpack.
fn value_at(frame: &[u8], at: usize) -> Option<(Option<usize>, usize)> {
    let head = *frame.get(at)?;
    let body = at + 1;
    let sized = |bytes: usize| -> Option<(usize, usize)> {
        let size = frame.get(body..body + bytes)?.iter().fold(0, |size, byte| size << 8 | usize::from(*byte));
        Some((size, body + bytes))
    };
    let skipped = |(size, body): (usize, usize)| Some((None, body.checked_add(size)?));
    match head {
        0x80..=0x8f => Some((Some(2 * usize::from(head & 0x0f)), body)),
        0x90..=0x9f => Some((Some(usize::from(head & 0x0f)), body)),
        0xa0..=0xbf => skipped((usize::from(head & 0x1f), body)),
        0x00..=0x7f | 0xc0 | 0xc2 | 0xc3 | 0xe0..=0xff => Some((None, body)),
        0xc4 | 0xd9 => skipped(sized(1)?),
        0xc5 | 0xda => skipped(sized(2)?),
        0xc6 | 0xdb => skipped(sized(4)?),
        0xc7..=0xc9 => sized(1 << (head - 0xc7)).and_then(|(size, body)| skipped((size, body + 1))),
        0xcc..=0xcf => skipped((1 << (head - 0xcc), body)),
        0xd0..=0xd3 => skipped((1 << (head - 0xd0), body)),
        0xca => skipped((4, body)),
        0xcb => skipped((8, body)),
        0xd4..=0xd8 => skipped((1 + (1 << (head - 0xd4)), body)),
        0xdc | 0xdd => sized(2 << (head - 0xdc)).map(|(size, body)| (Some(size), body)),
        0xde | 0xdf => sized(2 << (head - 0xde)).map(|(size, body)| (Some(2 * size), body)),
        0xc1 => None,
    }
}

/// A value as [`Reader::value`] takes it: all of it, but of an array or a map only its length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Value<'a> {
    Unsigned(u64),
    Negative(i64),
    Bytes(&'a [u8]),
    Text(&'a str),
    Array(usize),
    Map(usize),
}

/// Reads msgpack that has a known form, value by value. Each method returns None for any other bytes.
pub struct Reader<'a>(pub &'a [u8]);

impl<'a> Reader<'a> {
    /// Takes exactly these bytes.
    pub fn literal(&mut self, bytes: &[u8]) -> Option<()> {
        self.0 = self.0.strip_prefix(bytes)?;
        Some(())
    }

    pub fn array(&mut self) -> Option<usize> {
        match self.byte()? {
            head @ 0x90..=0x9f => Some(usize::from(head & 0x0f)),
            head @ (0xdc | 0xdd) => self.big_endian(2 << (head - 0xdc)).map(|size| size as usize),
            _ => None,
        }
    }

    pub fn bytes(&mut self) -> Option<&'a [u8]> {
        let head = self.byte().filter(|head| (0xc4..=0xc6).contains(head))?;
        let size = self.big_endian(1 << (head - 0xc4))? as usize;
        self.split(size)
    }

    pub fn unsigned(&mut self) -> Option<u64> {
        match self.byte()? {
            value @ 0x00..=0x7f => Some(u64::from(value)),
            head @ 0xcc..=0xcf => self.big_endian(1 << (head - 0xcc)),
            _ => None,
        }
    }

    #[inline]
    pub fn value(&mut self) -> Option<Value<'a>> {
        match self.0.first()? {
            0x00..=0x7f | 0xcc..=0xcf => self.unsigned().map(Value::Unsigned),
            0xc4..=0xc6 => self.bytes().map(Value::Bytes),
            0x90..=0x9f | 0xdc | 0xdd => self.array().map(Value::Array),
            0xa0..=0xbf | 0xd9..=0xdb => self.text().map(Value::Text),
            0xd0..=0xd3 | 0xe0..=0xff => self.signed(),
            0x80..=0x8f | 0xde | 0xdf => self.map().map(Value::Map),
            _ => None,
        }
    }

    /// Takes one value of any kind, with all that is in it.
    pub fn skip(&mut self) -> Option<&'a [u8]> {
        let (mut left, mut at) = (1_usize, 0);
        while left > 0 {
            let (inner, behind) = value_at(self.0, at)?;
            left = (left - 1).saturating_add(inner.unwrap_or(0));
            at = behind;
        }
        self.split(at)
    }

    fn map(&mut self) -> Option<usize> {
        match self.byte()? {
            head @ 0x80..=0x8f => Some(usize::from(head & 0x0f)),
            head => self.big_endian(2 << (head - 0xde)).map(|size| size as usize),
        }
    }

    fn text(&mut self) -> Option<&'a str> {
        let size = match self.byte()? {
            head @ 0xa0..=0xbf => usize::from(head & 0x1f),
            head => self.big_endian(1 << (head - 0xd9))? as usize,
        };
        std::str::from_utf8(self.split(size)?).ok()
    }

    /// An integer in a form that may be negative.
    fn signed(&mut self) -> Option<Value<'a>> {
        let value = match self.byte()? {
            head @ 0xe0..=0xff => i64::from(head as i8),
            head => {
                let n_bytes = 1 << (head - 0xd0);
                let unused = 64 - 8 * n_bytes as u32;
                (self.big_endian(n_bytes)? << unused) as i64 >> unused
            }
        };
        Some(u64::try_from(value).map_or(Value::Negative(value), Value::Unsigned))
    }

    fn byte(&mut self) -> Option<u8> {
        self.split(1).map(|bytes| bytes[0])
    }

    fn big_endian(&mut self, n_bytes: usize) -> Option<u64> {
        Some(self.split(n_bytes)?.iter().fold(0, |value, byte| value << 8 | u64::from(*byte)))
    }

    fn split(&mut self, n_bytes: usize) -> Option<&'a [u8]> {
        let (front, rest) = self.0.split_at_checked(n_bytes)?;
        self.0 = rest;
        Some(front)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits { depth: 4, values: 20, containers: 8 };

    fn fault(frame: &[u8]) -> Option<Fault> {
        scan(frame, &LIMITS).err().map(|refused| refused.fault)
    }

    #[test]
    fn containers_values_and_depth_are_bounded() {
        assert_eq!(fault(&[&[0x97][..], &[0x90; 7]].concat()), None);
        assert_eq!(fault(&[&[0x98][..], &[0x80; 8]].concat()), Some(Fault::Containers));
        assert_eq!(fault(&[0x91, 0x91, 0x91, 0x90]), None);
        assert_eq!(fault(&[0x91, 0x91, 0x91, 0x91, 0x90]), Some(Fault::Depth));
        assert_eq!(fault(&[&[0xdc, 0, 19][..], &[0xc0; 19]].concat()), None);
        assert_eq!(fault(&[0xdc, 0, 20]), Some(Fault::Values));
        assert_eq!(fault(&[0xde, 0, 10]), Some(Fault::Values));
        assert_eq!(fault(&[0xdd, 0xff, 0xff, 0xff, 0xff]), Some(Fault::Values));
    }

    #[test]
    fn what_is_cut_short_or_no_msgpack_ends_it() {
        for frame in
            [&[][..], &[0xc1], &[0x92, 0xc1], &[0xdd, 0, 0], &[0xc6, 0xff, 0xff, 0xff, 0xff], &[0xd9]]
        {
            assert_eq!(fault(frame), None);
        }
    }
    #[test]
    fn a_reader_takes_what_it_is_asked_for_and_nothing_else() {
        let frame = [&[0x93][..], b"\xa1k", &[0xc4, 2, 7, 8], &[0xcd, 1, 2], &[0xdc, 0, 0x20]].concat();
        let mut reader = Reader(&frame);
        assert_eq!(reader.array(), Some(3));
        assert_eq!(reader.literal(b"\xa1x"), None);
        assert_eq!(reader.literal(b"\xa1k"), Some(()));
        assert_eq!(reader.bytes(), Some(&[7, 8][..]));
        assert_eq!(reader.unsigned(), Some(0x102));
        assert_eq!(reader.array(), Some(0x20));
        assert_eq!(
            (reader.0, reader.array(), reader.bytes(), reader.unsigned()),
            (&[][..], None, None, None)
        );
        for (frame, value) in [
            (&[0xd0, 0xfe][..], Value::Negative(-2)),
            (&[0xd1, 0x7f, 0xff], Value::Unsigned(0x7fff)),
            (&[0xd3, 0x80, 0, 0, 0, 0, 0, 0, 0], Value::Negative(i64::MIN)),
            (&[0xd9, 1, b'x'], Value::Text("x")),
            (&[0xde, 0, 3], Value::Map(3)),
        ] {
            assert_eq!(Reader(frame).value(), Some(value));
            assert_eq!(Reader(&frame[..frame.len() - 1]).value(), None);
        }
        let nested = [0x82, 0xa1, b'x', 0x91, 0x90, 1, 0xc4, 1, 9];
        assert_eq!(Reader(&[&nested[..], &[7]].concat()).skip(), Some(&nested[..]));
        for cut in 0..nested.len() {
            assert_eq!(Reader(&nested[..cut]).skip(), None);
        }
        for cut in [&[0xc6, 0xff, 0xff, 0xff, 0xff, 1][..], &[0xc5, 0], &[0xcf, 1], &[0xff]] {
            assert_eq!(
                (Reader(cut).array(), Reader(cut).bytes(), Reader(cut).unsigned()),
                (None, None, None)
            );
        }
    }
}
