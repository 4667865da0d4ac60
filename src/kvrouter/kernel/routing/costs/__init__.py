"""What a rank costs, by each rule that there is: a file for each."""
