"""The pages of the site that are made from data, and from files outside of docs/."""
