"""What keeps a vault within its policies: values, plans, jobs, and what runs them."""
