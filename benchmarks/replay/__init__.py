"""What replays say of policies: data in ``results``, and a page with plots made of it."""
