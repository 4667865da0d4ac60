"""The workers of one model: worker ranks as dense slots, with columns of what each is and does."""
