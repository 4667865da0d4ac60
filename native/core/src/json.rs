//! One pass over JSON text, before anything is built of it: is it JSON, and how much would be built?
//!
//! Strings are scanned many bytes at a time; nothing is unescaped and nothing is kept but where the
//! fields of an outermost object are.

use std::ops::Range;

/// What one text may hold.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Containers in containers.
    pub depth: usize,
    /// Values of all kinds, the numbers of `number_fields` apart.
    pub values: usize,
    /// Members of one object, or elements of one array, those numbers apart.
    pub items: usize,
    /// Arrays and objects.
    pub containers: usize,
    /// Numbers in arrays of `number_fields`, all together.
    pub numbers: usize,
    /// Bytes of all strings together that are not plain ASCII, as they are written or as Python holds them,
    /// whichever is more: one wide character makes it hold two or four bytes for each of a string.
    pub text_bytes: usize,
    /// Bytes of a string in one of `short_fields`.
    pub short_bytes: usize,
    /// Bytes of a name in an object.
    pub key_bytes: usize,
    /// Bytes of a number.
    pub number_bytes: usize,
    /// Blanks between two tokens of JSON, before the first one and behind the last.
    pub blanks_in_row: usize,
    /// All blanks outside of strings.
    pub blanks: usize,
    /// Fields of the outermost object, and with a dot of an object in it, that hold lists of token ids.
    pub number_fields: Vec<Vec<u8>>,
    /// Fields of the outermost object that hold no long string.
    pub short_fields: Vec<Vec<u8>>,
    /// The names that what decodes the text reads, whatever object they are in; None where it reads all. It
    /// skips other fields: in them only depth, names, numbers and blanks are bounded.
    pub read_fields: Option<Vec<ReadField>>,
    /// Containers in containers that become objects; what is deeper is skipped too.
    pub read_depth: usize,
    /// Whether `NaN`, `Infinity` and `-Infinity` are numbers, as Python's own decoder has it.
    pub takes_nan: bool,
}

/// A name that is read; of one that is free all fields inside are read too, whatever their names.
#[derive(Clone, Debug)]
pub struct ReadField {
    pub name: Vec<u8>,
    pub is_free: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    Syntax(&'static str),
    NotFinite,
    Depth,
    Values,
    Items,
    Containers,
    Numbers,
    TextBytes,
    ShortBytes,
    KeyBytes,
    NumberBytes,
    Blanks,
}

/// Why a text is refused, the byte where that showed, and the path of the field: `messages[2].content`.
#[derive(Debug, PartialEq, Eq)]
pub struct Refused {
    pub fault: Fault,
    pub at: usize,
    pub path: String,
}

/// What a text holds. Fields of the outermost object are in the order of the text, as they are written.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Scanned {
    pub values: usize,
    pub containers: usize,
    pub numbers: usize,
    pub text_bytes: usize,
    pub fields: Vec<Field>,
}

/// A field of the outermost object: where it is, and how long the strings in its value are, names apart.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Field {
    pub key: Range<usize>,
    pub value: Range<usize>,
    pub strings: StringSize,
}

/// The size of strings once their escapes are read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StringSize {
    pub chars: usize,
    /// In UTF-8.
    pub bytes: usize,
}

const PATH_BYTES_MAX: usize = 300;

pub fn scan(text: &[u8], limits: &Limits) -> Result<Scanned, Refused> {
    if let Err(error) = std::str::from_utf8(text) {
        let (fault, at) = (Fault::Syntax("this is not UTF-8"), error.valid_up_to());
        return Err(Refused { fault, at, path: String::new() });
    }
    let mut scanner = Scanner {
        text,
        limits,
        at: 0,
        frames: Vec::new(),
        in_numbers: false,
        in_short: false,
        unread_from: usize::MAX,
        free_from: usize::MAX,
        blanks_left: limits.blanks,
        found: Scanned::default(),
    };
    match scanner.run() {
        Ok(()) => Ok(scanner.found),
        Err(fault) => Err(Refused { fault, at: scanner.at, path: scanner.path(fault) }),
    }
}

struct Frame {
    is_object: bool,
    /// Members or elements that began.
    begun: usize,
    /// Those of them that count as items.
    items: usize,
    key: Range<usize>,
}

struct Scanner<'a> {
    text: &'a [u8],
    limits: &'a Limits,
    at: usize,
    frames: Vec<Frame>,
    in_numbers: bool,
    in_short: bool,
    /// How many containers lie around the field that is skipped, and around one in which all is read; more
    /// than there are where none is.
    unread_from: usize,
    free_from: usize,
    blanks_left: usize,
    found: Scanned,
}

impl Scanner<'_> {
    fn run(&mut self) -> Result<(), Fault> {
        self.skip_space()?;
        let mut is_open = self.value()?;
        // Each turn a value has ended, or a container has just been opened.
        while let Some(is_object) = self.frames.last().map(|frame| frame.is_object) {
            self.skip_space()?;
            let close = if is_object { b'}' } else { b']' };
            match self.peek() {
                Some(byte) if byte == close => {
                    self.at += 1;
                    self.frames.pop();
                    self.leave_fields(self.frames.len() + 1);
                    self.end_field();
                    is_open = false;
                    continue;
                }
                Some(b',') if !is_open => {
                    self.at += 1;
                    self.skip_space()?;
                }
                Some(_) if is_open => {}
                Some(_) => return Err(Fault::Syntax("a comma or the end of the list or object is missing")),
                None => return Err(Fault::Syntax("it ends too early")),
            }
            if is_object {
                self.key()?;
            }
            is_open = self.value()?;
            if !is_open {
                self.end_field();
            }
        }
        self.skip_space()?;
        if self.at < self.text.len() {
            return Err(Fault::Syntax("something follows the end"));
        }
        Ok(())
    }

    fn peek(&self) -> Option<u8> {
        self.text.get(self.at).copied()
    }

    #[inline]
    fn skip_space(&mut self) -> Result<(), Fault> {
        let most = self.limits.blanks_in_row.min(self.blanks_left);
        let begin = self.at;
        while let Some(b' ' | b'\n' | b'\r' | b'\t') = self.peek() {
            if self.at - begin == most {
                return Err(Fault::Blanks);
            }
            self.at += 1;
        }
        self.blanks_left -= self.at - begin;
        Ok(())
    }

    /// Takes one value, or the beginning of a container; returns whether it is one.
    fn value(&mut self) -> Result<bool, Fault> {
        let Some(first) = self.peek() else { return Err(Fault::Syntax("it ends too early")) };
        self.count(first)?;
        match first {
            b'{' | b'[' => {
                if self.frames.len() >= self.limits.depth {
                    return Err(Fault::Depth);
                }
                if !self.is_unread() {
                    self.found.containers += 1;
                    if self.found.containers > self.limits.containers {
                        return Err(Fault::Containers);
                    }
                }
                self.at += 1;
                self.frames.push(Frame { is_object: first == b'{', begun: 0, items: 0, key: 0..0 });
                return Ok(true);
            }
            b'"' => self.text()?,
            b'-' | b'0'..=b'9' => self.number()?,
            b't' => self.word(b"true")?,
            b'f' => self.word(b"false")?,
            b'n' => self.word(b"null")?,
            b'N' if self.text[self.at..].starts_with(b"NaN") => self.not_finite(b"NaN")?,
            b'I' if self.text[self.at..].starts_with(b"Infinity") => self.not_finite(b"Infinity")?,
            _ => return Err(Fault::Syntax("a value is missing")),
        }
        Ok(false)
    }

    #[inline]
    fn count(&mut self, first: u8) -> Result<(), Fault> {
        let is_number = matches!(first, b'-' | b'0'..=b'9');
        // Fields of the outermost object are counted all the same: where each is, is returned.
        let is_unread = self.is_unread() && !(self.frames.len() == 1 && self.frames[0].is_object);
        if let Some(frame) = self.frames.last_mut() {
            frame.begun += 1;
            if is_unread {
                return Ok(());
            }
            if is_number && self.in_numbers && !frame.is_object {
                self.found.numbers += 1;
                return if self.found.numbers > self.limits.numbers { Err(Fault::Numbers) } else { Ok(()) };
            }
            frame.items += 1;
            if frame.items > self.limits.items {
                return Err(Fault::Items);
            }
        }
        self.found.values += 1;
        if self.found.values > self.limits.values {
            return Err(Fault::Values);
        }
        Ok(())
    }

    fn key(&mut self) -> Result<(), Fault> {
        if self.peek() != Some(b'"') {
            return Err(Fault::Syntax("a name in quotes is missing"));
        }
        let begin = self.at + 1;
        self.string()?;
        let key = begin..self.at - 1;
        if key.len() > self.limits.key_bytes {
            return Err(Fault::KeyBytes);
        }
        self.skip_space()?;
        if self.peek() != Some(b':') {
            return Err(Fault::Syntax("a colon is missing"));
        }
        self.at += 1;
        self.skip_space()?;
        if self.frames.len() == 1 {
            let name = &self.text[key.clone()];
            self.in_numbers = self.limits.number_fields.iter().any(|field| field == name);
            self.in_short = self.limits.short_fields.iter().any(|field| field == name);
            let value = self.at..self.at;
            self.found.fields.push(Field { key: key.clone(), value, ..Field::default() });
        } else if let [Frame { is_object: true, key: outer, .. }, _] = &self.frames[..] {
            let (outer, name) = (&self.text[outer.clone()], &self.text[key.clone()]);
            if self.limits.number_fields.iter().all(|field| field != outer) {
                self.in_numbers = self.limits.number_fields.iter().any(|field| is_dotted(field, outer, name));
            }
        }
        if let Some(frame) = self.frames.last_mut() {
            frame.key = key;
        }
        self.enter_field();
        Ok(())
    }

    /// A field begins: whether it is skipped.
    #[inline]
    fn enter_field(&mut self) {
        let Some(fields) = &self.limits.read_fields else { return };
        let depth = self.frames.len();
        self.leave_fields(depth);
        if self.is_unread() || depth >= self.free_from {
            return;
        }
        let name = &self.text[self.frames[depth - 1].key.clone()];
        match fields.iter().find(|field| field.name == name) {
            Some(ReadField { is_free: false, .. }) => {}
            Some(_) => self.free_from = depth,
            None if name.contains(&b'\\') => self.free_from = depth, // it may be any name
            None => self.unread_from = depth,
        }
    }

    /// Fields with so many containers around, or more, have ended.
    #[inline]
    fn leave_fields(&mut self, depth: usize) {
        if depth <= self.unread_from {
            self.unread_from = usize::MAX;
        }
        if depth <= self.free_from {
            self.free_from = usize::MAX;
        }
    }

    #[inline]
    fn is_unread(&self) -> bool {
        let depth = self.frames.len();
        depth >= self.unread_from || depth > self.limits.read_depth
    }

    /// A value has ended; in the outermost object that is a field.
    #[inline]
    fn end_field(&mut self) {
        if self.frames.len() == 1 && self.frames[0].is_object {
            if let Some(field) = self.found.fields.last_mut() {
                field.value.end = self.at;
            }
        }
    }

    /// A string that is a value: one that is no plain ASCII is slow to decode.
    fn text(&mut self) -> Result<(), Fault> {
        let begin = self.at;
        let is_escaped = self.string()?;
        if self.is_unread() {
            return Ok(());
        }
        let written = &self.text[begin..self.at];
        if self.in_short && written.len() > self.limits.short_bytes {
            return Err(Fault::ShortBytes);
        }
        let inner = &written[1..written.len() - 1];
        let mut size = StringSize { chars: inner.len(), bytes: inner.len() };
        if is_escaped || !inner.is_ascii() {
            let left_bytes = self.limits.text_bytes - self.found.text_bytes;
            if written.len() > left_bytes {
                return Err(Fault::TextBytes);
            }
            let char_bytes;
            (size, char_bytes) = decoded_size(inner);
            let held_bytes = written.len().max(size.chars * char_bytes);
            if held_bytes > left_bytes {
                return Err(Fault::TextBytes);
            }
            self.found.text_bytes += held_bytes;
        }
        if let Some(field) = self.found.fields.last_mut() {
            field.strings.chars += size.chars;
            field.strings.bytes += size.bytes;
        }
        Ok(())
    }

    /// Takes a string; returns whether it has escapes.
    fn string(&mut self) -> Result<bool, Fault> {
        self.at += 1;
        let mut is_escaped = false;
        loop {
            self.at += plain_bytes(&self.text[self.at..]);
            match self.peek() {
                Some(b'"') => {
                    self.at += 1;
                    return Ok(is_escaped);
                }
                Some(b'\\') => {
                    is_escaped = true;
                    self.escape()?;
                }
                Some(_) => return Err(Fault::Syntax("a control character in a string is not escaped")),
                None => return Err(Fault::Syntax("a string does not end")),
            }
        }
    }

    fn escape(&mut self) -> Result<(), Fault> {
        while self.peek() == Some(b'\\') {
            let escaped = self.text.get(self.at + 1);
            match escaped {
                Some(b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't') => self.at += 2,
                Some(b'u') => {
                    let digits = self.text.get(self.at + 2..self.at + 6);
                    if !digits.is_some_and(|digits| digits.iter().all(u8::is_ascii_hexdigit)) {
                        return Err(Fault::Syntax("an escape in a string is none"));
                    }
                    self.at += 6;
                }
                _ => return Err(Fault::Syntax("an escape in a string is none")),
            }
        }
        Ok(())
    }

    fn not_finite(&mut self, word: &'static [u8]) -> Result<(), Fault> {
        if self.limits.takes_nan {
            self.word(word)
        } else {
            Err(Fault::NotFinite)
        }
    }

    fn number(&mut self) -> Result<(), Fault> {
        let begin = self.at;
        if self.peek() == Some(b'-') {
            self.at += 1;
            if self.text[self.at..].starts_with(b"Infinity") {
                return self.not_finite(b"Infinity");
            }
        }
        if self.peek() == Some(b'0') {
            self.at += 1;
        } else {
            self.digits()?;
        }
        if self.peek() == Some(b'.') {
            self.at += 1;
            self.digits()?;
        }
        if let Some(b'e' | b'E') = self.peek() {
            self.at += 1;
            if let Some(b'+' | b'-') = self.peek() {
                self.at += 1;
            }
            self.digits()?;
        }
        if self.at - begin > self.limits.number_bytes {
            return Err(Fault::NumberBytes);
        }
        Ok(())
    }

    fn digits(&mut self) -> Result<(), Fault> {
        let begin = self.at;
        while let Some(b'0'..=b'9') = self.peek() {
            self.at += 1;
        }
        if self.at == begin {
            return Err(Fault::Syntax("a number is none"));
        }
        Ok(())
    }

    fn word(&mut self, word: &[u8]) -> Result<(), Fault> {
        if !self.text[self.at..].starts_with(word) {
            return Err(Fault::Syntax("a value is missing"));
        }
        self.at += word.len();
        Ok(())
    }

    /// The path of what is refused: of the list or object that is too long or too deep or holds the blanks,
    /// of the outermost field for what is counted over all, else of the value itself.
    fn path(&self, fault: Fault) -> String {
        let frames = match fault {
            Fault::Values | Fault::Containers | Fault::Numbers | Fault::TextBytes => {
                &self.frames[..self.frames.len().min(1)]
            }
            Fault::Items | Fault::KeyBytes | Fault::Blanks => {
                &self.frames[..self.frames.len().saturating_sub(1)]
            }
            _ => &self.frames[..],
        };
        let mut path = Vec::new();
        for frame in frames {
            if frame.is_object {
                if !path.is_empty() {
                    path.push(b'.');
                }
                path.extend_from_slice(&self.text[frame.key.clone()]);
            } else {
                path.extend_from_slice(format!("[{}]", frame.begun.saturating_sub(1)).as_bytes());
            }
            if path.len() > PATH_BYTES_MAX {
                break;
            }
        }
        let mut path = String::from_utf8_lossy(&path).into_owned();
        if let Some((cut, _)) = path.char_indices().find(|(at, _)| *at >= PATH_BYTES_MAX) {
            path.truncate(cut);
            path.push('…');
        }
        path
    }
}

fn is_dotted(field: &[u8], outer: &[u8], name: &[u8]) -> bool {
    field.strip_prefix(outer).and_then(|rest| rest.strip_prefix(b".")) == Some(name)
}

/// The size of a string between its quotes, and the bytes that Python holds for each of its characters.
fn decoded_size(text: &[u8]) -> (StringSize, usize) {
    let mut size = StringSize::default();
    let mut widest = 1;
    let mut rest = text;
    while !rest.is_empty() {
        let plain = rest.iter().position(|&byte| byte == b'\\').unwrap_or(rest.len());
        size.chars += rest[..plain].iter().filter(|&&byte| byte & 0xc0 != 0x80).count();
        size.bytes += plain;
        widest = widest.max(match rest[..plain].iter().max() {
            Some(0xf0..) => 4,
            Some(0xc4..) => 2,
            _ => 1,
        });
        rest = &rest[plain..];
        if rest.is_empty() {
            break;
        }
        let (taken, bytes, char_bytes) = match (code_unit(rest), code_unit(rest.get(6..).unwrap_or(&[]))) {
            (Some(0xd800..=0xdbff), Some(0xdc00..=0xdfff)) => (12, 4, 4),
            (Some(0..=0x7f), _) => (6, 1, 1),
            (Some(0x80..=0xff), _) => (6, 2, 1),
            (Some(0x100..=0x7ff), _) => (6, 2, 2),
            (Some(_), _) => (6, 3, 2),
            (None, _) => (2, 1, 1),
        };
        size.chars += 1;
        size.bytes += bytes;
        widest = widest.max(char_bytes);
        rest = rest.get(taken..).unwrap_or(&[]);
    }
    (size, widest)
}

/// The UTF-16 code unit of an escape at the beginning, if it is one of those.
fn code_unit(text: &[u8]) -> Option<u16> {
    let digits = text.strip_prefix(b"\\u")?.get(..4)?;
    u16::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()
}

/// How many of the first bytes of a string stand for themselves.
#[inline]
fn plain_bytes(bytes: &[u8]) -> usize {
    const BLOCK: usize = 32;
    let mut at = 0;
    for block in bytes.chunks_exact(BLOCK) {
        if block.iter().fold(false, |found, &byte| found | ends_plain(byte)) {
            break;
        }
        at += BLOCK;
    }
    at + bytes[at..].iter().position(|&byte| ends_plain(byte)).unwrap_or(bytes.len() - at)
}

#[inline]
fn ends_plain(byte: u8) -> bool {
    (byte == b'"') | (byte == b'\\') | (byte < 0x20)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits() -> Limits {
        Limits {
            depth: 4,
            values: 20,
            items: 5,
            containers: 12,
            numbers: 6,
            text_bytes: 40,
            short_bytes: 12,
            key_bytes: 8,
            number_bytes: 10,
            blanks_in_row: 4,
            blanks: 10,
            number_fields: vec![b"prompt".to_vec(), b"x.ids".to_vec()],
            short_fields: vec![b"s".to_vec()],
            read_fields: None,
            read_depth: usize::MAX,
            takes_nan: false,
        }
    }

    fn refused(text: &str) -> (Fault, String) {
        let refused = scan(text.as_bytes(), &limits()).unwrap_err();
        (refused.fault, refused.path)
    }

    #[test]
    fn fields_are_where_they_are() {
        let text = br#" {"a" : [1, 2] ,"b":"x\"]", "c":{"a":null}} "#;
        let found = scan(text, &limits()).unwrap();
        let fields: Vec<_> =
            found.fields.iter().map(|at| (&text[at.key.clone()], &text[at.value.clone()])).collect();
        assert_eq!(
            fields,
            [(b"a".as_slice(), b"[1, 2]".as_slice()), (b"b", br#""x\"]""#), (b"c", br#"{"a":null}"#)]
        );
        assert_eq!(found.values, 7);
    }

    #[test]
    fn each_bound_names_its_field() {
        assert_eq!(refused(r#"{"m":[{"n":[[1]]}]}"#), (Fault::Depth, "m[0].n[0]".into()));
        assert_eq!(refused(r#"{"m":[1,2,3,4,5,6]}"#), (Fault::Items, "m".into()));
        assert_eq!(refused(r#"{"m":{"a":1,"b":1,"c":1,"d":1,"e":1,"f":1}}"#), (Fault::Items, "m".into()));
        assert_eq!(
            refused(r#"{"m":[[1,2,3,4],[1,2,3,4],[1,2,3,4],[1,2,3,4],[1,2]]}"#),
            (Fault::Values, "m".into())
        );
        assert_eq!(refused(r#"{"prompt":[[1,2,3],[4,5,6],[7]]}"#), (Fault::Numbers, "prompt".into()));
        assert_eq!(refused(r#"{"m":[1,{"x":NaN}]}"#), (Fault::NotFinite, "m[1].x".into()));
        assert_eq!(refused(r#"{"m":-Infinity}"#), (Fault::NotFinite, "m".into()));
        let lax = Limits { takes_nan: true, ..limits() };
        assert_eq!(scan(br#"{"m":[NaN,Infinity,-Infinity]}"#, &lax).unwrap().values, 5);
        assert!(scan(br#"{"m":-NaN}"#, &lax).is_err());
        assert_eq!(refused(r#"{"m":{"123456789":1}}"#), (Fault::KeyBytes, "m".into()));
        assert_eq!(refused(r#"{"m":12345678901}"#), (Fault::NumberBytes, "m".into()));
        assert_eq!(refused(r#"{"s":{"a":["12345678901"]}}"#), (Fault::ShortBytes, "s.a[0]".into()));
        assert_eq!(refused(&format!(r#"{{"m":["{}\n"]}}"#, "x".repeat(40))), (Fault::TextBytes, "m".into()));
        assert_eq!(
            refused(&format!(r#"{{"m":["é","{}"]}}"#, "é".repeat(19))),
            (Fault::TextBytes, "m".into())
        );
        assert!(scan(
            format!(r#"{{"m":["é","{}"],"s":"1234567890"}}"#, "x".repeat(90)).as_bytes(),
            &limits()
        )
        .is_ok());
        assert_eq!(refused(r#"{"x":{"ids":[1,2,3,4,5,6,7]}}"#), (Fault::Numbers, "x".into()));
        assert_eq!(refused(r#"{"x":{"ids":1,"id":[1,2,3,4,5,6]}}"#), (Fault::Items, "x.id".into()));
        assert!(scan(br#"{"prompt":[1,2,3,4,5,6]}"#, &limits()).is_ok());
    }

    #[test]
    fn containers_are_counted_whatever_they_hold() {
        assert!(scan(br#"{"m":[[],[],[]],"n":[{},{},{}],"o":[[]]}"#, &limits()).is_ok());
        assert_eq!(
            refused(r#"{"m":[[],[],[]],"n":[{},{},{}],"o":[[],[]],"p":[1]}"#),
            (Fault::Containers, "p".into())
        );
    }

    #[test]
    fn what_is_skipped_holds_as_much_as_it_likes() {
        let field = |name: &str, is_free| ReadField { name: name.into(), is_free };
        let fields = vec![field("l", false), field("v", false), field("f", true)];
        let limits = Limits { depth: 9, read_fields: Some(fields), ..limits() };
        let many = "[[],[],[],[],[],[],1,2,3,4,5,6,7,8,9,\"€€€€€€€€€€€€€€\"]";
        let with = |text: &str| text.replace('X', many);
        for (text, values) in [
            (r#"{"l":[{"u":X},{"u":1}],"m":{"l":X}}"#, 5),
            (r#"{"u":X,"v":[1]}"#, 4),
            (r#"{"l":[{"u":{"f":X}},1]}"#, 4),
        ] {
            assert_eq!(scan(with(text).as_bytes(), &limits).unwrap().values, values, "{text}");
        }
        for text in [
            r#"{"l":X}"#,
            r#"{"u":1,"v":X}"#,
            r#"{"l":[{"u":1},X]}"#,
            r#"{"l":[{"u":1},[X]]}"#,
            r#"{"u":{"v":1},"l":X}"#,
            r#"{"f":{"u":X}}"#,
            r#"{"a":1,"b":1,"c":1,"d":1,"e":1,"g":1}"#,
            r#"{"f":[{"u":1},{"u":X}]}"#,
            r#"{"\u006c":{"u":X}}"#,
            "X",
        ] {
            let refused = scan(with(text).as_bytes(), &limits).unwrap_err();
            assert_eq!(refused.fault, Fault::Items, "{text}");
        }
        let flat = Limits { read_fields: None, read_depth: 1, ..limits.clone() };
        assert_eq!(scan(with(r#"{"a":X,"b":[[[1]]],"c":1}"#).as_bytes(), &flat).unwrap().values, 4);
        assert!(scan(br#"{"a":1,"b":1,"c":1,"d":1,"e":1,"f":1}"#, &flat).is_err());
        assert_eq!(scan(br#"{"u":[[[[[[[[[[1]]]]]]]]]]}"#, &limits).unwrap_err().fault, Fault::Depth);
    }

    #[test]
    fn blanks_are_bounded_in_a_row_and_in_all() {
        for (text, path) in [
            ("{}1", ""),
            ("1{}", ""),
            ("{{}\"a\":1}", ""),
            ("{\"a\"{}:1}", ""),
            ("{\"a\":{}1}", ""),
            ("{\"a\":1{}}", ""),
            ("{\"a\":[{}1]}", "a"),
            ("{\"a\":[1{},2]}", "a"),
            ("{\"a\":[1,{}2]}", "a"),
            ("{\"a\":[{{}}]}", "a[0]"),
            ("{\"a\":{\"b\":1,{}\"c\":1}}", "a"),
        ] {
            let with = |blanks| text.replacen("{}", blanks, 1);
            assert!(scan(with(" \n\r\t").as_bytes(), &limits()).is_ok(), "{text}");
            assert_eq!(refused(&with("     ")), (Fault::Blanks, path.into()), "{text}");
        }
        assert!(scan(br#"{"a":[1,   1,    1   ],"b":"           "}"#, &limits()).is_ok());
        assert_eq!(refused(r#"{"a":[1,   1,    1   ,1 ]}"#), (Fault::Blanks, "a".into()));
    }

    #[test]
    fn the_strings_of_a_field_have_the_size_that_they_are_read_as() {
        let text = r#"{"a":["x\n\u00e9\u20ac","\ud83d\ude00\ud83d",{"name":"é€😀"}],"b":"plain","c":1}"#;
        let limits = Limits { text_bytes: 1000, ..limits() };
        let found = scan(text.as_bytes(), &limits).unwrap();
        let sizes: Vec<_> = found.fields.iter().map(|at| (at.strings.chars, at.strings.bytes)).collect();
        assert_eq!(sizes, [(4 + 2 + 3, 7 + 7 + 9), (5, 5), (0, 0)]);
    }

    #[test]
    fn one_wide_character_counts_for_all_of_its_string() {
        let text = |end: &str| format!(r#"{{"m":["{}{end}"]}}"#, "x".repeat(30));
        for (end, held_bytes) in [("é", 34), ("€", 62), ("😀", 124), (r"\u00e9", 38), (r"\u20ac", 62)] {
            let bounded = |text_bytes| scan(text(end).as_bytes(), &Limits { text_bytes, ..limits() });
            assert_eq!(bounded(held_bytes - 1).unwrap_err().fault, Fault::TextBytes, "{end}");
            assert_eq!(bounded(held_bytes).unwrap().text_bytes, held_bytes, "{end}");
        }
    }

    #[test]
    fn what_is_no_json_is_refused() {
        for text in [
            "",
            " ",
            "{",
            "[",
            "[1",
            "[1,",
            "[1,]",
            "[,1]",
            "{\"a\"}",
            "{\"a\":}",
            "{\"a\":1,}",
            "{a:1}",
            "tru",
            "nul",
            "01",
            "1.",
            "-",
            ".5",
            "1e",
            "+1",
            "\"",
            "\"\\x\"",
            "\"\\u12g4\"",
            "\"\n\"",
            "[1 2]",
            "{\"a\" 1}",
            "1 1",
            "]",
            "[}",
            "{]",
            "[1}",
            "{\"a\":1]",
        ] {
            assert!(matches!(refused(text).0, Fault::Syntax(_)), "{text}");
        }
        assert!(scan(b"\"\xff\"", &limits()).is_err());
    }

    #[test]
    fn strings_end_where_they_end_whatever_their_length() {
        let limits = Limits { text_bytes: 1000, ..limits() };
        for size in 0..100 {
            for escape in ["", "\\\"", "\\n", "\\u00e9", "é"] {
                let text = format!("[\"{}{escape}{}\", 1]", "x".repeat(size), "y".repeat(size / 2));
                assert_eq!(scan(text.as_bytes(), &limits).unwrap().values, 3, "{text}");
            }
        }
    }
}
