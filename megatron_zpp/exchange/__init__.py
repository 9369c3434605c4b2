"""How weights and gradients of units travel between ranks: routes as values, and what runs them."""
