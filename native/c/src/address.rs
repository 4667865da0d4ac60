//! Where a worker's door is: `unix:/path` or `tcp://host:port`.

#[derive(Debug, PartialEq, Eq)]
pub enum Address {
    Unix(String),
    /// As `host:port`; an IPv6 host in brackets.
    Tcp(String),
}

impl Address {
    /// Reads an address, or says what is wrong with it.
    pub fn parse(text: &str) -> Result<Self, String> {
        if let Some(path) = text.strip_prefix("unix:") {
            if path.starts_with('/') {
                return Ok(Address::Unix(path.to_owned()));
            }
            return Err(format!("address: '{text}' needs an absolute path: unix:/path"));
        }
        let Some(place) = text.strip_prefix("tcp://") else {
            return Err(format!("address: '{text}' is neither unix:/path nor tcp://host:port"));
        };
        match place.rsplit_once(':') {
            Some((host, port)) if !host.is_empty() && port.parse::<u16>().is_ok_and(|port| port > 0) => {
                Ok(Address::Tcp(place.to_owned()))
            }
            _ => Err(format!("address: '{text}' is not tcp://host:port")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Address;

    #[test]
    fn addresses() {
        assert_eq!(Address::parse("unix:/run/kv"), Ok(Address::Unix("/run/kv".into())));
        assert_eq!(Address::parse("tcp://[::1]:7000"), Ok(Address::Tcp("[::1]:7000".into())));
        for bad in ["", "unix:kv", "tcp://host", "tcp://:1", "tcp://host:0", "tcp://host:70000", "http://a:1"]
        {
            assert!(Address::parse(bad).is_err(), "{bad}");
        }
    }
}
