"""Who is there: worker ranks as dense slots, with columns of what each one is and does."""
