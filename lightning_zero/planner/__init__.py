"""Will it fit? What training will hold and send, before anything is rented or allocated."""
