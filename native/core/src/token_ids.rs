//! Token ids from a JSON list of numbers.

/// Token ids, and where their list ends in the text.
#[derive(Debug, PartialEq, Eq)]
pub struct TokenIds {
    pub ids: Vec<u32>,
    pub end: usize,
}

/// The element that is no token id, and the byte where it begins.
#[derive(Debug, PartialEq, Eq)]
pub struct NotATokenId {
    pub index: usize,
    pub at: usize,
}

/// Reads the list that `text` begins with: whole numbers from 0 to 2³²−1, without fraction and exponent.
pub fn parsed(text: &[u8]) -> Result<TokenIds, NotATokenId> {
    let mut reader = Reader { text, at: 0 };
    let mut ids = Vec::new();
    let mut is_open = reader.takes(b'[');
    if reader.takes(b']') {
        return Ok(TokenIds { ids, end: reader.at });
    }
    loop {
        reader.skip_space();
        let begin = reader.at;
        match reader.number() {
            Some(id) if is_open => ids.push(id),
            _ => return Err(NotATokenId { index: ids.len(), at: begin }),
        }
        is_open = reader.takes(b',');
        if !is_open && reader.takes(b']') {
            return Ok(TokenIds { ids, end: reader.at });
        }
    }
}

struct Reader<'a> {
    text: &'a [u8],
    at: usize,
}

impl Reader<'_> {
    #[inline]
    fn skip_space(&mut self) {
        while let Some(b' ' | b'\n' | b'\r' | b'\t') = self.text.get(self.at) {
            self.at += 1;
        }
    }

    #[inline]
    fn takes(&mut self, byte: u8) -> bool {
        self.skip_space();
        let is_there = self.text.get(self.at) == Some(&byte);
        self.at += usize::from(is_there);
        is_there
    }

    /// One number, if it is an id and an element ends with it.
    #[inline]
    fn number(&mut self) -> Option<u32> {
        let begin = self.at;
        let mut value = 0_u32;
        while let Some(digit @ b'0'..=b'9') = self.text.get(self.at) {
            value = value.checked_mul(10)?.checked_add(u32::from(digit - b'0'))?;
            self.at += 1;
        }
        let ends = matches!(self.text.get(self.at), Some(b',' | b']' | b' ' | b'\n' | b'\r' | b'\t'));
        (ends && self.at > begin).then_some(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_becomes_ids() {
        for (text, ids) in [
            ("[]", vec![]),
            (" [ ] ", vec![]),
            ("[0]", vec![0]),
            ("[1, 22\t,\n4294967295 ]", vec![1, 22, u32::MAX]),
        ] {
            let found = parsed(text.as_bytes()).unwrap();
            assert_eq!((found.ids, found.end), (ids, text.trim_end().len()), "{text}");
        }
        assert_eq!(parsed(b"[1],[2]").unwrap(), TokenIds { ids: vec![1], end: 3 });
    }

    #[test]
    fn what_is_no_id_is_named_by_its_place() {
        for (text, index, at) in [
            ("[-1]", 0, 1),
            ("[1, 2.0]", 1, 4),
            ("[1, 2e1]", 1, 4),
            ("[4294967296]", 0, 1),
            ("[99999999999999999999]", 0, 1),
            ("[1,true]", 1, 3),
            ("[1, null]", 1, 4),
            ("[\"1\"]", 0, 1),
            ("[[1]]", 0, 1),
            ("[1, ]", 1, 4),
            ("[1", 0, 1),
            ("[1,", 1, 3),
            ("[", 0, 1),
            ("1", 0, 0),
            ("", 0, 0),
        ] {
            assert_eq!(parsed(text.as_bytes()), Err(NotATokenId { index, at }), "{text}");
        }
    }
}
