"""One rank's event stream: next, duplicate or gap; Live, Recovering or Partial."""
