"""What a person looks at: report pages, the live explorer and the demo."""
